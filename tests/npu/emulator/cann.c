/*
 * CANN emulator: just enough of the Ascend runtime, on host memory, for the unmodified torch_npu,
 * memcache_hybrid and memfabric_hybrid wheels to load and run on a machine without an NPU.
 *
 * It emulates the API, not the hardware: copies are memcpy at the moment of the call, kernels do NOT compute,
 * nothing here says anything about a real NPU's behaviour or speed. Device memory is never given back.
 *
 * Environment: CANN_EMU_DEVICES (count, default 1), CANN_EMU_SOC (name), CANN_EMU_EVENT_DELAY_US (an event
 * completes that long after it was recorded), CANN_EMU_TRACE=1 (print each placeholder that is called).
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define INVALID 107000     /* ACL_ERROR_RT_PARAM_INVALID */
#define NO_MEMORY 207001   /* ACL_ERROR_RT_MEMORY_ALLOCATION */
#define TOO_SMALL 100000   /* ACL_ERROR_INVALID_PARAM */
#define HUGE_BYTES 2097152 /* 2 MiB: granularity of device memory */
#define PAGE_BYTES 4096
#define UNUSED __attribute__((unused))

static __thread int32_t current_device;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- memory ---- */

/* Device memory lies in 16T..24T, the window that memfabric takes for HBM. Not shared between processes. */
#define DEVICE_START 0x110000000000ULL
#define DEVICE_END 0x180000000000ULL
static uintptr_t next_device_address = DEVICE_START;

static void *device_alloc(size_t size) {
    size = (size + HUGE_BYTES - 1) & ~(size_t)(HUGE_BYTES - 1);
    if (!size)
        size = HUGE_BYTES;
    pthread_mutex_lock(&lock);
    void *at = mmap((void *)next_device_address, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE, -1, 0);
    next_device_address += size + HUGE_BYTES;
    pthread_mutex_unlock(&lock);
    return at == MAP_FAILED ? NULL : at;
}

int32_t aclrtMalloc(void **out, size_t size, uint32_t policy UNUSED) {
    *out = device_alloc(size);
    return *out ? 0 : NO_MEMORY;
}

int32_t aclrtMallocAlign32(void **out, size_t size, uint32_t policy) { return aclrtMalloc(out, size, policy); }

int32_t rtMalloc(void **out, uint64_t size, uint32_t type, uint16_t module UNUSED) {
    return aclrtMalloc(out, size, type);
}

int32_t aclrtGetMemInfo(uint32_t attribute UNUSED, size_t *free_bytes, size_t *total) {
    *free_bytes = *total = 4ULL << 30;
    return 0;
}

int32_t halMemAlloc(void **out, uint64_t size, uint64_t flag UNUSED) {
    char *at = mmap(NULL, size + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return 6;
    *out = (void *)(((uintptr_t)at + HUGE_BYTES - 1) & ~(uintptr_t)(HUGE_BYTES - 1));
    return 0;
}

/* Host ranges that the device may reach: allocated here or registered. */
#define MAX_PINNED 4096
static struct {
    uintptr_t start;
    size_t size;
} pinned[MAX_PINNED];

static int pin(uintptr_t start, size_t size) {
    int done = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_PINNED && !done; i++)
        if (!pinned[i].size)
            pinned[i].start = start, pinned[i].size = size, done = 1;
    pthread_mutex_unlock(&lock);
    return done;
}

static int unpin(uintptr_t start) {
    int done = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_PINNED && !done; i++)
        if (pinned[i].size && pinned[i].start == start)
            pinned[i].size = 0, done = 1;
    pthread_mutex_unlock(&lock);
    return done;
}

int32_t aclrtMallocHost(void **out, size_t size) {
    if (posix_memalign(out, PAGE_BYTES, size ? size : 1))
        return NO_MEMORY;
    return pin((uintptr_t)*out, size ? size : 1) ? 0 : NO_MEMORY;
}

int32_t aclrtFreeHost(void *at) {
    unpin((uintptr_t)at);
    free(at);
    return 0;
}

int32_t aclrtHostRegisterV2(void *at, uint64_t size, uint32_t flag UNUSED) {
    if (!size || (uintptr_t)at % PAGE_BYTES)
        return INVALID;
    return pin((uintptr_t)at, size) ? 0 : NO_MEMORY;
}

int32_t aclrtHostRegister(void *at, uint64_t size, int type UNUSED, void **out) {
    *out = at;
    return aclrtHostRegisterV2(at, size, 0);
}

int32_t aclrtHostUnregister(void *at) { return unpin((uintptr_t)at) ? 0 : INVALID; }

int32_t halHostRegister(void *at, uint64_t size UNUSED, uint32_t flag UNUSED, uint32_t device UNUSED, void **out) {
    if (out)
        *out = at;
    return 0;
}

typedef struct { /* aclrtPtrAttributes, acl_rt.h */
    uint32_t device, type, page_size, reserved[4];
} attributes_t;

int32_t aclrtPointerGetAttributes(const void *at, attributes_t *out) {
    uintptr_t address = (uintptr_t)at;
    enum { HOST, DEVICE, UNREGISTERED } type = UNREGISTERED; /* aclrtMemLocationType */
    if (address >= DEVICE_START && address < DEVICE_END)
        type = DEVICE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_PINNED; i++)
        if (address >= pinned[i].start && address - pinned[i].start < pinned[i].size)
            type = HOST;
    pthread_mutex_unlock(&lock);
    *out = (attributes_t){.device = (uint32_t)current_device, .type = type, .page_size = PAGE_BYTES};
    return 0;
}

/* ---- copies ---- */

int32_t aclrtMemcpy(void *dst, size_t room, const void *src, size_t size, uint32_t kind UNUSED) {
    if (size > room)
        return TOO_SMALL;
    memcpy(dst, src, size);
    return 0;
}

int32_t aclrtMemcpyAsync(void *dst, size_t room, const void *src, size_t size, uint32_t kind, void *stream UNUSED) {
    return aclrtMemcpy(dst, room, src, size, kind);
}

int32_t rtMemcpyAsyncWithoutCheckKind(void *dst, size_t room, const void *src, size_t size, uint32_t kind,
                                      void *stream UNUSED) {
    return aclrtMemcpy(dst, room, src, size, kind);
}

int32_t aclrtMemcpy2d(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                      uint32_t kind UNUSED) {
    for (size_t row = 0; row < height; row++)
        memcpy((char *)dst + row * dst_pitch, (const char *)src + row * src_pitch, width);
    return 0;
}

int32_t aclrtMemcpy2dAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                           size_t height, uint32_t kind, void *stream UNUSED) {
    return aclrtMemcpy2d(dst, dst_pitch, src, src_pitch, width, height, kind);
}

int32_t aclrtMemcpyBatch(void **dst, size_t *room, void **src, size_t *sizes, size_t count,
                         void *attributes UNUSED, size_t *indexes UNUSED, size_t n UNUSED, size_t *failed UNUSED) {
    for (size_t i = 0; i < count; i++)
        if (aclrtMemcpy(dst[i], room[i], src[i], sizes[i], 0))
            return TOO_SMALL;
    return 0;
}

/* For tests: how often the call below was made, and of how many copies. */
static uint64_t batch_calls, batch_copies;

void cann_emu_batches(uint64_t *calls, uint64_t *copies) {
    *calls = __atomic_load_n(&batch_calls, __ATOMIC_ACQUIRE);
    *copies = __atomic_load_n(&batch_copies, __ATOMIC_ACQUIRE);
}

typedef struct { /* aclrtMemcpyBatchAttr, acl_rt.h */
    uint32_t dst_device, dst_type, src_device, src_type;
    uint8_t reserved[16];
} batch_attributes_t;

static int lies(const void *at, uint32_t type) {
    return ((uintptr_t)at >= DEVICE_START && (uintptr_t)at < DEVICE_END) == (type == 1);
}

int32_t aclrtMemcpyBatchAsync(void **dst, size_t *room, void **src, size_t *sizes, size_t count,
                              const batch_attributes_t *attributes, size_t *indexes, size_t n, size_t *failed,
                              void *stream) {
    *failed = SIZE_MAX;
    if (!stream || !count || n != 1 || indexes[0] || attributes->dst_type == attributes->src_type)
        return INVALID;
    for (size_t i = 0; i < count; i++)
        if (!lies(dst[i], attributes->dst_type) || !lies(src[i], attributes->src_type)) {
            *failed = i;
            return INVALID;
        }
    __atomic_add_fetch(&batch_calls, 1, __ATOMIC_RELEASE);
    __atomic_add_fetch(&batch_copies, count, __ATOMIC_RELEASE);
    return aclrtMemcpyBatch(dst, room, src, sizes, count, 0, indexes, n, failed);
}

int32_t aclrtMemset(void *dst, size_t room UNUSED, int32_t value, size_t size) {
    memset(dst, value, size);
    return 0;
}

/* ---- streams and events ---- */

static int32_t new_handle(void **out) {
    *out = calloc(1, 64);
    return *out ? 0 : NO_MEMORY;
}

int32_t aclrtCreateStream(void **out) { return new_handle(out); }

int32_t aclrtCreateStreamWithConfig(void **out, uint32_t priority UNUSED, uint32_t flag UNUSED) {
    return new_handle(out);
}

int32_t aclrtStreamQuery(void *stream UNUSED, int32_t *status) {
    *status = 0;
    return 0;
}

int32_t aclrtStreamGetId(void *stream UNUSED, int32_t *id) {
    *id = 1;
    return 0;
}

int32_t aclrtGetCurrentContext(void **out) {
    static char context[64];
    *out = context;
    return 0;
}

typedef struct {
    int64_t recorded_ns; /* 0 = never recorded, which counts as done */
} event_t;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int is_done(const event_t *event) {
    const char *delay = getenv("CANN_EMU_EVENT_DELAY_US");
    int64_t recorded = __atomic_load_n(&event->recorded_ns, __ATOMIC_ACQUIRE);
    return !delay || !recorded || now_ns() - recorded >= atoll(delay) * 1000;
}

int32_t aclrtCreateEvent(void **out) { return new_handle(out); }
int32_t aclrtCreateEventWithFlag(void **out, uint32_t flag UNUSED) { return new_handle(out); }
int32_t aclrtCreateEventExWithFlag(void **out, uint32_t flag UNUSED) { return new_handle(out); }

int32_t aclrtRecordEvent(event_t *event, void *stream UNUSED) {
    __atomic_store_n(&event->recorded_ns, now_ns(), __ATOMIC_RELEASE);
    return 0;
}

int32_t aclrtQueryEventStatus(event_t *event, int32_t *status) {
    *status = is_done(event);
    return 0;
}

int32_t aclrtSynchronizeEvent(event_t *event) {
    while (!is_done(event))
        usleep(50);
    return 0;
}

int32_t aclrtSynchronizeEventWithTimeout(event_t *event, int32_t timeout_ms UNUSED) {
    return aclrtSynchronizeEvent(event);
}

int32_t aclrtQueryEventWaitStatus(event_t *event UNUSED, int32_t *status) {
    *status = 0;
    return 0;
}

int32_t aclrtQueryEvent(event_t *event UNUSED, int32_t *status) {
    *status = 0;
    return 0;
}

int32_t aclrtEventElapsedTime(float *ms, event_t *start, event_t *end) {
    *ms = (float)(end->recorded_ns - start->recorded_ns) / 1e6f;
    return 0;
}

int32_t aclrtLaunchCallback(void (*function)(void *), void *argument, int blocking UNUSED, void *stream UNUSED) {
    function(argument);
    return 0;
}

int32_t aclrtProcessReport(int32_t timeout_ms UNUSED) {
    usleep(1000);
    return 0;
}

/* ---- devices ---- */

int32_t aclrtSetDevice(int32_t device) {
    current_device = device;
    return 0;
}

int32_t aclrtGetDevice(int32_t *device) {
    *device = current_device;
    return 0;
}

int32_t aclrtGetDeviceCount(uint32_t *count) {
    const char *devices = getenv("CANN_EMU_DEVICES");
    *count = devices ? (uint32_t)atoi(devices) : 1;
    return 0;
}

const char *aclrtGetSocName(void) {
    const char *soc = getenv("CANN_EMU_SOC");
    return soc ? soc : "Ascend910B1";
}

int32_t aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) {
    *major = 1, *minor = 0, *patch = 0;
    return 0;
}

/* Answers that are one fixed number, or the number that was asked about. */
#define ANSWER(name, parameters, out, value) \
    int32_t name parameters { \
        *out = value; \
        return 0; \
    }
ANSWER(aclrtDeviceCanAccessPeer, (int32_t * out, int32_t a UNUSED, int32_t b UNUSED), out, 1)
ANSWER(aclrtDeviceGetBareTgid, (int32_t * out), out, getpid())
ANSWER(aclGetDeviceCapability, (uint32_t device UNUSED, int32_t info UNUSED, int64_t *out), out, 24)
ANSWER(aclrtGetPhyDevIdByLogicDevId, (int32_t id, int32_t *out), out, id)
ANSWER(aclrtGetSysParamOpt, (int32_t option UNUSED, int64_t *out), out, 0)
ANSWER(aclrtCtxGetSysParamOpt, (int32_t option UNUSED, int64_t *out), out, 0)
ANSWER(aclrtQueryDeviceStatus, (int32_t device UNUSED, int32_t *out), out, 0)
ANSWER(rtGetLogicDevIdByUserDevId, (int32_t id, int32_t *out), out, id)
ANSWER(rtGetVisibleDeviceIdByLogicDeviceId, (int32_t id, int32_t *out), out, id)
ANSWER(rtGetDevicePhyIdByIndex, (uint32_t id, uint32_t *out), out, id)
ANSWER(rtDeviceGetBareTgid, (uint32_t * out), out, 1)
ANSWER(rtGetDeviceInfo, (uint32_t device UNUSED, int32_t m UNUSED, int32_t i UNUSED, int64_t *out), out, 0)

int32_t rtGetC2cCtrlAddr(uint64_t *address, uint32_t *length) {
    *address = 0, *length = 0;
    return 0;
}

int g_devmm_mem_dev = -1;

/* Looked up by the wheels when they load or start; they only have to exist. */
#define PLACEHOLDER(name) \
    long name(void) { \
        if (getenv("CANN_EMU_TRACE")) \
            fprintf(stderr, "cann_emu: " #name "\n"); \
        return 0; \
    }
#include "placeholders.inc"
