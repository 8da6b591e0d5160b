/*
 * Scattered copies without the GIL: one call moves one batch of extents.
 *
 * A batch goes from engine memory to the arena or back and is larger than any cache, so on x86-64 the
 * bytes are written with non-temporal stores: the destination's lines are not read first and the
 * engine's working set stays in its caches. Each extent starts somewhere else, where the hardware's
 * prefetcher knows nothing yet; the next extent's lines are therefore asked for while this one is
 * copied. Elsewhere (aarch64) this is memcpy.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__SSE2__)
#include <emmintrin.h>
#define STREAMING 1
#else
#define STREAMING 0
#endif

/* Shorter extents gain nothing from streaming and pay its alignment and fence. */
#define STREAM_MIN_BYTES 2048
#define LINE 64
#define PARTS 4   /* stretches of one extent that advance together: more pages and DRAM rows in flight */
#define MEETS 320 /* of 4 KiB: from one line before a store to four behind it a load waits for it */
#define MOST_SHORTER 32 /* lines that a stretch may give up, to be copied after the others */
#define AHEAD 256 /* bytes that each stretch's prefetch runs ahead of its copy, into the next extent at the end */

#if STREAMING
static void stream_line(char *dst, const char *src) {
    __m128i a = _mm_loadu_si128((const __m128i *)src);
    __m128i b = _mm_loadu_si128((const __m128i *)(src + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(src + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(src + 48));
    _mm_stream_si128((__m128i *)dst, a);
    _mm_stream_si128((__m128i *)(dst + 16), b);
    _mm_stream_si128((__m128i *)(dst + 32), c);
    _mm_stream_si128((__m128i *)(dst + 48), d);
}

/*
 * How long each of the stretches of `n` bytes is, where the destination lies `distance` behind the source.
 *
 * A load whose address has the low 12 bits of a store that has not left the core waits for that store, as if it read
 * the same bytes. A load of one stretch meets the stores of another where distance + k * length is a few lines past a
 * multiple of 4 KiB; blocks of 16 KiB and more would be cut at multiples of 4 KiB, and the slots of an arena put
 * objects a few lines from the engine's pages. So a stretch is made some lines shorter until none meets another.
 */
static size_t stretch(size_t n, uintptr_t distance) {
    size_t longest = n / LINE / PARTS, fewest = longest > 2 * MOST_SHORTER ? longest - MOST_SHORTER : longest / 2;
    for (size_t lines = longest; lines > fewest; lines--) {
        uintptr_t behind = distance + LINE, before = behind, part = lines * LINE;
        int meets = 0;
        for (int k = 1; k < PARTS; k++) {
            behind += part, before -= part;
            meets |= (behind & 4095) < MEETS || (before & 4095) < MEETS;
        }
        if (!meets)
            return part;
    }
    return longest * LINE;
}

/* Copies `n` bytes; `next` is where the next extent's source starts. */
static void move(char *dst, const char *src, size_t n, const char *next) {
    if (n < STREAM_MIN_BYTES) {
        memcpy(dst, src, n);
        return;
    }
    size_t head = (size_t)(-(uintptr_t)dst) & (LINE - 1);
    memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    size_t part = stretch(n, (uintptr_t)dst - (uintptr_t)src), last = part - AHEAD;
    size_t whole = (n - PARTS * part) / LINE * LINE;
    for (size_t at = 0; at < part; at += LINE) {
        const char *ahead = at < last ? src + at + AHEAD : next + (at - last);
        for (size_t p = 0; p < PARTS; p++) {
            _mm_prefetch(ahead + p * part, _MM_HINT_NTA);
            stream_line(dst + p * part + at, src + p * part + at);
        }
    }
    dst += PARTS * part, src += PARTS * part, n -= PARTS * part;
    for (size_t at = 0; at < whole; at += LINE)
        stream_line(dst + at, src + at);
    memcpy(dst + whole, src + whole, n - whole);
}
#else
static void move(char *dst, const char *src, size_t n, const char *next) {
    (void)next;
    memcpy(dst, src, n);
}
#endif

static void move_all(uintptr_t dst_base, uintptr_t src_base, const int64_t *dst, const int64_t *src,
                     const int64_t *nbytes, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        const char *next = (const char *)(src_base + src[i + 1 < count ? i + 1 : i]); /* a wrong guess is harmless */
        move((char *)(dst_base + dst[i]), (const char *)(src_base + src[i]), (size_t)nbytes[i], next);
    }
#if STREAMING
    _mm_sfence(); /* streamed lines are visible before the batch is reported done */
#endif
}

/* Takes a contiguous int64 vector of `object` into `view`; its length, or -1 with an exception set. */
static Py_ssize_t take_int64(PyObject *object, Py_buffer *view, const char *name) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return -1;
    const char *format = view->format ? view->format : "B";
    if (*format == '@' || *format == '=' || *format == '<')
        format++;
    if (view->ndim != 1 || view->itemsize != 8 || (strcmp(format, "l") && strcmp(format, "q"))) {
        PyBuffer_Release(view);
        PyErr_Format(PyExc_TypeError, "%s must be a contiguous one-dimensional array of int64", name);
        return -1;
    }
    return view->len / 8;
}

/* dst, src and nbytes of one call; the views are the caller's to release, `taken` of them, whatever is returned. */
typedef struct {
    Py_buffer views[3];
    int taken;
    Py_ssize_t count;
} Ranges;

static int take_ranges(PyObject *const objects[3], Ranges *ranges) {
    static const char *const names[3] = {"dst", "src", "nbytes"};
    Py_ssize_t lengths[3];
    for (ranges->taken = 0; ranges->taken < 3; ranges->taken++) {
        int i = ranges->taken;
        if ((lengths[i] = take_int64(objects[i], &ranges->views[i], names[i])) < 0)
            return -1;
    }
    if (lengths[0] != lengths[1] || lengths[0] != lengths[2]) {
        PyErr_Format(PyExc_ValueError, "dst, src and nbytes have %zd, %zd and %zd items; they must be equally long",
                     lengths[0], lengths[1], lengths[2]);
        return -1;
    }
    const int64_t *nbytes = ranges->views[2].buf;
    for (Py_ssize_t i = 0; i < lengths[2]; i++)
        if (nbytes[i] < 0) {
            PyErr_Format(PyExc_ValueError, "nbytes[%zd] is negative", i);
            return -1;
        }
    ranges->count = lengths[2];
    return 0;
}

static void release_ranges(Ranges *ranges) {
    while (ranges->taken)
        PyBuffer_Release(&ranges->views[--ranges->taken]);
}

static PyObject *copy(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long dst_base, src_base;
    PyObject *objects[3], *result = NULL;
    if (!PyArg_ParseTuple(args, "KKOOO:copy", &dst_base, &src_base, &objects[0], &objects[1], &objects[2]))
        return NULL;
    Ranges ranges;
    if (take_ranges(objects, &ranges) == 0) {
        Py_BEGIN_ALLOW_THREADS
        move_all((uintptr_t)dst_base, (uintptr_t)src_base, ranges.views[0].buf, ranges.views[1].buf,
                 ranges.views[2].buf, ranges.count);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release_ranges(&ranges);
    return result;
}

/*
 * Giving the interpreter back wakes the thread that waited for it, and Linux puts a woken thread on the waker's core:
 * an engine's thread would share it with this copy for many milliseconds, although another core is idle. So whoever is
 * on the core of `thread` moves to another one that it may use, if there is one. Where that cannot be found out, or is
 * not allowed, it stays.
 */
#ifdef __linux__
static int core_of(long thread) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/self/task/%ld/stat", thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = read(fd, line, sizeof line - 1);
    close(fd);
    if (length <= 0)
        return -1;
    line[length] = 0;
    char *field = strrchr(line, ')'); /* behind the thread's name, field 2; the core is field 39, see proc(5) */
    for (int number = 2; field && number < 39; number++)
        field = strchr(field + 1, ' ');
    return field ? atoi(field + 1) : -1;
}

static void step_aside(long thread) {
    cpu_set_t allowed, others;
    int core = thread > 0 ? core_of(thread) : -1;
    if (core < 0 || core != sched_getcpu() || sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return;
    others = allowed;
    CPU_CLR(core, &others);
    if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others) != 0)
        return;
    if (sched_setaffinity(0, sizeof allowed, &allowed) != 0) {
        /* What is allowed has changed meanwhile: ask for every core, of which the kernel takes those that are. */
        memset(&allowed, 0xff, sizeof allowed);
        sched_setaffinity(0, sizeof allowed, &allowed);
    }
}
#else
static void step_aside(long thread) { (void)thread; }
#endif

static double monotonic_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* what time.monotonic reads on Linux */
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Do these words of the source still say what they said when its places were told? Bytes read before were those then. */
static int unchanged(uintptr_t base, const int64_t *at, const int64_t *words, Py_ssize_t count) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (Py_ssize_t i = 0; i < count; i++)
        if (__atomic_load_n((const int64_t *)(base + at[i]), __ATOMIC_ACQUIRE) != words[i])
            return 0;
    return 1;
}

/* Batches in order until all are copied, `halt` is set or a word has changed; how many were. */
static Py_ssize_t move_batches(uintptr_t dst_base, uintptr_t src_base, const Ranges *ranges, const int64_t *ends,
                               Py_ssize_t batches, double *landed, const unsigned char *halt, const int64_t *words_at,
                               const int64_t *words, Py_ssize_t count) {
    const int64_t *dst = ranges->views[0].buf, *src = ranges->views[1].buf, *nbytes = ranges->views[2].buf;
    int64_t at = 0;
    if (!unchanged(src_base, words_at, words, count))
        return 0;
    for (Py_ssize_t batch = 0; batch < batches; batch++) {
        if (__atomic_load_n(halt, __ATOMIC_ACQUIRE))
            return batch;
        move_all(dst_base, src_base, dst + at, src + at, nbytes + at, (Py_ssize_t)(ends[batch] - at));
        at = ends[batch];
        if (!unchanged(src_base, words_at, words, count))
            return batch;
        double now = monotonic_s();
        __atomic_store(&landed[batch], &now, __ATOMIC_RELEASE);
    }
    return batches;
}

static int check_ends(const int64_t *ends, Py_ssize_t batches, Py_ssize_t count) {
    int64_t at = 0;
    for (Py_ssize_t batch = 0; batch < batches; batch++) {
        if (ends[batch] < at || ends[batch] > count) {
            PyErr_Format(PyExc_ValueError, "ends[%zd] is not between the end before it and the %zd extents", batch,
                         count);
            return -1;
        }
        at = ends[batch];
    }
    return 0;
}

static PyObject *copy_batches(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long dst_base, src_base;
    PyObject *objects[3], *ends_object, *at_object = NULL, *words_object = NULL, *result = NULL;
    Py_buffer ends = {0}, landed = {0}, halt = {0}, words_at = {0}, words = {0};
    long beside;
    if (!PyArg_ParseTuple(args, "KKOOOOw*y*l|OO:copy_batches", &dst_base, &src_base, &objects[0], &objects[1],
                          &objects[2], &ends_object, &landed, &halt, &beside, &at_object, &words_object))
        return NULL;
    Ranges ranges = {.taken = 0};
    Py_ssize_t batches = take_int64(ends_object, &ends, "ends"), places = -1, count = -1;
    if (batches < 0 || take_ranges(objects, &ranges) < 0 ||
        (at_object && (places = take_int64(at_object, &words_at, "words_at")) < 0) ||
        (words_object && (count = take_int64(words_object, &words, "words")) < 0))
        goto out;
    if (places != count) {
        PyErr_Format(PyExc_ValueError, "words_at and words have %zd and %zd items; they must be equally long", places,
                     count);
        goto out;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (((const int64_t *)words_at.buf)[i] % 8) {
            PyErr_Format(PyExc_ValueError, "words_at[%zd] is not a multiple of eight", i);
            goto out;
        }
    if (landed.len < batches * (Py_ssize_t)sizeof(double) || (uintptr_t)landed.buf % sizeof(double) || halt.len < 1) {
        PyErr_Format(PyExc_ValueError, "landed must hold %zd doubles and halt one byte", batches);
        goto out;
    }
    if (check_ends(ends.buf, batches, ranges.count) < 0)
        goto out;
    Py_ssize_t copied;
    Py_BEGIN_ALLOW_THREADS
    step_aside(beside);
    copied = move_batches((uintptr_t)dst_base, (uintptr_t)src_base, &ranges, ends.buf, batches, landed.buf, halt.buf,
                          words_at.buf, words.buf, count);
    Py_END_ALLOW_THREADS
    result = PyLong_FromSsize_t(copied);
out:
    release_ranges(&ranges);
    if (batches >= 0)
        PyBuffer_Release(&ends);
    if (places >= 0)
        PyBuffer_Release(&words_at);
    if (count >= 0)
        PyBuffer_Release(&words);
    PyBuffer_Release(&landed);
    PyBuffer_Release(&halt);
    return result;
}

static PyObject *acquire(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* pairs with the release that stores into landed */
    Py_RETURN_NONE;
}

static PyObject *stretch_bytes(PyObject *self, PyObject *args) {
    (void)self;
    Py_ssize_t nbytes;
    unsigned long long distance;
    if (!PyArg_ParseTuple(args, "nK:stretch_bytes", &nbytes, &distance))
        return NULL;
#if STREAMING
    if (nbytes >= STREAM_MIN_BYTES)
        return PyLong_FromSize_t(stretch((size_t)nbytes, (uintptr_t)distance));
#endif
    return PyLong_FromSsize_t(nbytes);
}

static PyMethodDef methods[] = {
    {"acquire", acquire, METH_NOARGS,
     "acquire()\n--\n\n"
     "What the calling thread reads from now on is no older than what it has read of landed: on processors that\n"
     "reorder reads, call it between reading that a batch has landed and reading the batch's bytes."},
    {"copy", copy, METH_VARARGS,
     "copy(dst_base, src_base, dst, src, nbytes)\n--\n\n"
     "Copy nbytes[i] bytes from address src_base + src[i] to dst_base + dst[i], for every i, without the GIL.\n\n"
     "dst, src, nbytes: int64 arrays of equal length. Sources and destinations must not overlap; the\n"
     "caller has checked every address."},
    {"copy_batches", copy_batches, METH_VARARGS,
     "copy_batches(dst_base, src_base, dst, src, nbytes, ends, landed, halt, beside, words_at=[], words=[])\n--\n\n"
     "As copy, batch after batch: batch b has the extents up to number ends[b]. landed[b], a double, becomes the\n"
     "CLOCK_MONOTONIC seconds at which its bytes were in place. No further batch begins once the byte halt is set.\n"
     "beside: native id of a thread of this process whose core is left to it, if there is another; 0 = none.\n"
     "words_at, words: int64 arrays of equal length. Eight bytes at src_base + words_at[i] must be words[i], before the\n"
     "first batch and behind each: the first batch of which that is not so does not count, and no further one begins.\n"
     "Returns how many batches were copied. Others may read landed and write halt meanwhile."},
    {"stretch_bytes", stretch_bytes, METH_VARARGS,
     "stretch_bytes(nbytes, distance)\n--\n\n"
     "Bytes of each of the four stretches in which an extent of nbytes is copied whose destination, at a multiple of\n"
     "64, lies distance (modulo 2**64) behind its source; nbytes where it is copied in one piece."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_copy", "Scattered copies without the GIL.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__copy(void) { return PyModule_Create(&module); }
