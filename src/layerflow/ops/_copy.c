/*
 * Scattered copies without the GIL: one call moves one batch of extents.
 *
 * A batch goes from engine memory to the arena or back and is larger than any cache, so on x86-64 the
 * bytes are written with non-temporal stores: the destination's lines are not read first and the
 * engine's working set stays in its caches. Each extent starts somewhere else, where the hardware's
 * prefetcher knows nothing yet; the next extent's lines are therefore asked for while this one is
 * copied. Elsewhere (aarch64) this is memcpy.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

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

/* Copies `n` bytes; `next` is where the next extent's source starts. */
static void move(char *dst, const char *src, size_t n, const char *next) {
    if (n < STREAM_MIN_BYTES) {
        memcpy(dst, src, n);
        return;
    }
    size_t head = (size_t)(-(uintptr_t)dst) & (LINE - 1);
    memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    size_t part = n / LINE / PARTS * LINE, last = part - AHEAD;
    for (size_t at = 0; at < part; at += LINE) {
        const char *ahead = at < last ? src + at + AHEAD : next + (at - last);
        for (size_t p = 0; p < PARTS; p++) {
            _mm_prefetch(ahead + p * part, _MM_HINT_NTA);
            stream_line(dst + p * part + at, src + p * part + at);
        }
    }
    memcpy(dst + PARTS * part, src + PARTS * part, n - PARTS * part);
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

static PyObject *copy(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long dst_base, src_base;
    PyObject *objects[3];
    if (!PyArg_ParseTuple(args, "KKOOO:copy", &dst_base, &src_base, &objects[0], &objects[1], &objects[2]))
        return NULL;
    static const char *const names[3] = {"dst", "src", "nbytes"};
    Py_buffer views[3];
    Py_ssize_t lengths[3];
    int taken = 0;
    PyObject *result = NULL;
    for (; taken < 3; taken++)
        if ((lengths[taken] = take_int64(objects[taken], &views[taken], names[taken])) < 0)
            goto out;
    if (lengths[0] != lengths[1] || lengths[0] != lengths[2]) {
        PyErr_Format(PyExc_ValueError, "dst, src and nbytes have %zd, %zd and %zd items; they must be equally long",
                     lengths[0], lengths[1], lengths[2]);
        goto out;
    }
    const int64_t *nbytes = views[2].buf;
    for (Py_ssize_t i = 0; i < lengths[2]; i++)
        if (nbytes[i] < 0) {
            PyErr_Format(PyExc_ValueError, "nbytes[%zd] is negative", i);
            goto out;
        }
    Py_BEGIN_ALLOW_THREADS
    move_all((uintptr_t)dst_base, (uintptr_t)src_base, views[0].buf, views[1].buf, nbytes, lengths[2]);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
out:
    while (taken--)
        PyBuffer_Release(&views[taken]);
    return result;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS,
     "copy(dst_base, src_base, dst, src, nbytes)\n--\n\n"
     "Copy nbytes[i] bytes from address src_base + src[i] to dst_base + dst[i], for every i, without the GIL.\n\n"
     "dst, src, nbytes: int64 arrays of equal length. Sources and destinations must not overlap; the\n"
     "caller has checked every address."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_copy", "Scattered copies without the GIL.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__copy(void) { return PyModule_Create(&module); }
