/* Launches prebuilt kernels from data.

   `launcher(...)` makes a Python function of one entry (pack.py writes the numbers that
   `read_entry` reads). A call of that function takes three steps:

     take   torch tensors become DLTensors, scalars become numbers
     bind   compares sizes and strides, computes every number of the launch
     start  encodes tensor maps, loads the kernel on its first use, launches on torch's stream

   programs.c replays whole calls with the same steps.

   Two interfaces are used: CPython's limited API (3.10), and DLPack's C exchange API, by which
   torch hands over a tensor and its current stream without a call into Python. A torch that lacks
   it (before 2.10) is asked through Python. The CUDA driver is opened at run time, so this file
   compiles without headers of torch or CUDA. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__)
/* glibc 2.34 gave these two a new version; with the old one a launcher loads in older systems too */
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
#endif

/* ---- DLPack 1: as much of dlpack.h as is needed ---- */

typedef struct { int32_t type, id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
    void *data; DLDevice device; int32_t ndim; DLDataType dtype;
    int64_t *shape, *strides; uint64_t byte_offset;
} DLTensor;
typedef struct DLManaged {
    uint32_t major, minor; void *context; void (*deleter)(struct DLManaged *); uint64_t flags;
    DLTensor tensor;
} DLManaged;
typedef struct {
    uint32_t major, minor; void *previous;
    int (*allocate)(DLTensor *like, DLManaged **out, void *context,
                    void (*error)(void *context, const char *kind, const char *message));
    void *managed_from_python; /* not used here */
    int (*to_python)(DLManaged *tensor, void **out); /* steals */
    int (*from_python)(void *object, DLTensor *out); /* borrows */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} ExchangeApi;
enum { CPU = 1, CUDA = 2 };

static struct {
    const ExchangeApi *api;        /* NULL: ask through Python */
    PyObject *tensor_type;         /* torch.Tensor */
    PyObject *stream, *dtypes;     /* without api: stream(device), {dtype: code << 8 | bits} */
    PyObject *data_ptr, *shape, *stride, *dtype, *get_device, *is_cuda; /* names, interned */
    int device_type;               /* CUDA; tests without a GPU launch tensors of the CPU */
} torch;

/* ---- the driver ---- */

typedef struct { _Alignas(64) uint64_t opaque[16]; } TensorMap;
typedef struct {
    unsigned id; char pad[4];
    union { int programmatic; char room[64]; } value;
} Attribute;
typedef struct {
    unsigned numbers[7]; /* grid x, y, z, block x, y, z, bytes of dynamic shared memory */
    void *stream; Attribute *attributes; unsigned num_attributes;
} LaunchConfig;
typedef struct { /* of `height` rows of `width` bytes */
    size_t from_x, from_y; unsigned from_type; const void *from_host; void *from, *from_array;
    size_t from_pitch, to_x, to_y; unsigned to_type; void *to_host, *to, *to_array;
    size_t to_pitch, width, height;
} Copy;
enum { MAX_DYNAMIC_SHARED = 8, PROGRAMMATIC_SERIALIZATION = 6, CAPTURE_RELAXED = 2 };
enum { MAX_DEVICES = 64 };

static struct {
    int (*cuDriverGetVersion)(int *);
    int (*cuGetErrorName)(int, const char **);
    int (*cuCtxGetDevice)(int *);
    int (*cuCtxPushCurrent_v2)(void *);
    int (*cuCtxPopCurrent_v2)(void **);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuThreadExchangeStreamCaptureMode)(int *);
    int (*cuLibraryLoadData)(void **, const void *, void *, void *, unsigned, void *, void *,
                             unsigned);
    int (*cuLibraryGetKernel)(void **, void *, const char *);
    int (*cuKernelSetAttribute)(int, int, void *, int);
    int (*cuKernelGetFunction)(void **, void *);
    int (*cuTensorMapEncodeTiled)(TensorMap *, int, unsigned, void *, const uint64_t *,
                                  const uint64_t *, const unsigned *, const unsigned *, int, int,
                                  int, int);
    int (*cuLaunchKernelEx)(const LaunchConfig *, void *, void **, void **);
    int (*cuEventCreate)(void **, unsigned);
    int (*cuEventDestroy_v2)(void *);
    int (*cuEventRecord)(void *, void *);
    int (*cuStreamWaitEvent)(void *, void *, unsigned);
    int (*cuStreamIsCapturing)(void *, int *);
    int (*cuMemsetD8Async)(void *, unsigned char, size_t, void *);
    int (*cuMemsetD32Async)(void *, unsigned, size_t, void *);
    int (*cuMemcpy2DAsync_v2)(const Copy *, void *);
} driver;
static const char *const DRIVER_NAMES[] = { /* in the order of the struct */
    "cuDriverGetVersion", "cuGetErrorName", "cuCtxGetDevice", "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRetain", "cuThreadExchangeStreamCaptureMode",
    "cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuKernelGetFunction",
    "cuTensorMapEncodeTiled", "cuLaunchKernelEx", "cuEventCreate", "cuEventDestroy_v2",
    "cuEventRecord", "cuStreamWaitEvent", "cuStreamIsCapturing", "cuMemsetD8Async",
    "cuMemsetD32Async", "cuMemcpy2DAsync_v2"};
static int driver_opened;
static void *primary_context[MAX_DEVICES];

/* Guards the loading of kernels, and contexts. A child of fork() gets a new one, and must not use
   handles of its parent: CUDA does not survive a fork. */
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static int kernels_loaded, forked;

static void in_child_of_fork(void) {
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    loading = fresh;
    forked = kernels_loaded;
}

/* ---- an entry ---- */

enum { TENSORS = 24, SCALARS = 16, SYMBOLS = 64, CHECKS = 192, MAPS = 12, ARGUMENTS = 96 };
enum { DIMENSIONS = 8, RANK = 5, DEPTH = 16 }; /* of tensors, tensor maps, an expression's stack */
enum { END, CONSTANT, SYMBOL, ADD, SUB, MUL, FLOORDIV, SHIFT, NUM_CODES };
enum { SIZE, STRIDE };
enum { POINTER, MAP, INT32, FLOAT32, NUM_KINDS };
typedef const int64_t *Expression; /* codes in postfix order, up to END */

typedef struct { int tensor, what, axis; Expression expected; } Place;
typedef struct {
    int dtype, tensor, rank, interleave, swizzle, l2, fill;
    unsigned box[RANK], steps[RANK]; Expression dims[RANK], strides[RANK - 1];
} MapSpec;
typedef struct {
    const char *label, *function, *cubin;
    PyObject *held;          /* what the pointers above and expressions point into */
    PyObject *names, *needs; /* of tensors and scalars; of checks: what is declared, as text */
    PyMethodDef method;
    int tensors, scalars, symbols, checks, maps, arguments, dependent;
    int tensor_at[TENSORS], scalar_at[SCALARS]; /* places among the arguments of a call */
    int ndim[TENSORS]; DLDataType dtype[TENSORS]; int is_float[SCALARS];
    Place symbol[SYMBOLS], check[CHECKS];
    Expression launch[7];    /* LaunchConfig's numbers */
    int kind[ARGUMENTS], index[ARGUMENTS]; Expression value[ARGUMENTS];
    MapSpec map[MAPS];
    void *kernel; _Atomic unsigned char ready[MAX_DEVICES]; /* loaded, for all devices and on one */
} Entry;

/* The arguments of a call, and the launch that they make: only addresses and stream are open. */
typedef struct {
    DLTensor tensor[TENSORS];
    int64_t room[TENSORS][2 * DIMENSIONS]; /* without api: shape and strides */
    int64_t value[SYMBOLS + SCALARS]; float real[SCALARS];
} Given;
typedef struct {
    LaunchConfig config; Attribute attribute;
    union { int32_t i; float f; } scalar[ARGUMENTS];
    uint64_t dims[MAPS][RANK], strides[MAPS][RANK - 1];
} Launch;

/* ---- refusals: what was got, what is needed, how to fix it ---- */

static const char *text_of(PyObject *texts, int i) {
    const char *text = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(texts, i), NULL);
    return text ? text : "?";
}

#define RAISE(type, e, text, ...) \
    (PyErr_Format(type, "%s: " text, (e)->label, __VA_ARGS__) ? 0 : -1) /* it returns NULL */
#define REFUSE(e, text, ...) RAISE(PyExc_ValueError, e, text, __VA_ARGS__)
#define SUCH_A_TENSOR "; launch it with such a tensor"

static int refuse_place(const Entry *e, const Place *p, int i, int64_t got, int64_t expected) {
    const char *name = text_of(e->names, p->tensor), *as = text_of(e->needs, i);
    return REFUSE(e, "%s has %s %lld along axis %d; need %lld%s%s" SUCH_A_TENSOR, name,
                  p->what == SIZE ? "size" : "stride", (long long)got, p->axis,
                  (long long)expected, *as ? ", " : "", as);
}

static int refuse_tensor(const Entry *e, int i, const char *got, const char *needs) {
    return REFUSE(e, "%s %s; need %s" SUCH_A_TENSOR, text_of(e->names, i), got, needs);
}

static int refuse_number(const Entry *e, const char *what, int64_t got) {
    return REFUSE(e, "%s is %lld; need a number that fits int32; launch fewer rows at once", what,
                  (long long)got);
}

/* ---- take: arguments of a call ---- */

static int64_t integer_of(PyObject *object) { /* steals; -1 with an exception if it is no integer */
    int64_t value = object ? PyLong_AsLongLong(object) : -1;
    Py_XDECREF(object);
    return value;
}

static int integers_of(PyObject *object, int64_t *to, int most) { /* steals a tuple; its length */
    Py_ssize_t n = object ? PyTuple_Size(object) : -1;
    for (Py_ssize_t i = 0; i < n && i < most; i++)
        to[i] = PyLong_AsLongLong(PyTuple_GetItem(object, i));
    Py_XDECREF(object);
    return PyErr_Occurred() ? -1 : (int)n;
}

/* A tensor by torch's Python interface: what `from_python` gives, in more time. */
static int ask_tensor(PyObject *x, DLTensor *t, int64_t *room) {
    PyObject *dtype = PyObject_GetAttr(x, torch.dtype);
    PyObject *code = dtype ? PyDict_GetItemWithError(torch.dtypes, dtype) : NULL; /* borrowed */
    long bits = code ? PyLong_AsLong(code) : 0;
    Py_XDECREF(dtype);
    PyObject *on_cuda = PyObject_GetAttr(x, torch.is_cuda);
    t->device.type = on_cuda == Py_True ? CUDA : CPU;
    Py_XDECREF(on_cuda);
    t->device.id = (int32_t)integer_of(PyObject_CallMethodObjArgs(x, torch.get_device, NULL));
    if (t->device.id < 0) t->device.id = 0; /* get_device says -1 of the CPU */
    t->data = (void *)(intptr_t)integer_of(PyObject_CallMethodObjArgs(x, torch.data_ptr, NULL));
    if (PyErr_Occurred()) return -1;
    t->ndim = integers_of(PyObject_GetAttr(x, torch.shape), room, DIMENSIONS);
    integers_of(PyObject_CallMethodObjArgs(x, torch.stride, NULL), room + DIMENSIONS, DIMENSIONS);
    t->dtype = (DLDataType){(uint8_t)(bits >> 8), (uint8_t)bits, 1};
    t->shape = room, t->strides = room + DIMENSIONS, t->byte_offset = 0;
    return PyErr_Occurred() ? -1 : 0;
}

static int take_tensor(const Entry *e, int i, PyObject *x, Given *g) {
    PyTypeObject *type = Py_TYPE(x), *wanted = (PyTypeObject *)torch.tensor_type;
    if (type != wanted && !PyType_IsSubtype(type, wanted))
        return refuse_tensor(e, i, "is no tensor", "a torch.Tensor");
    DLTensor *t = &g->tensor[i];
    if (torch.api ? torch.api->from_python(x, t) : ask_tensor(x, t, g->room[i])) return -1;
    t->data = (char *)t->data + t->byte_offset;
    return 0;
}

static int take_scalar(const Entry *e, int i, PyObject *x, Given *g) {
    int64_t *n = &g->value[e->symbols + i];
    *n = 0;
    if (e->is_float[i]) g->real[i] = (float)PyFloat_AsDouble(x);
    else *n = PyLong_AsLongLong(x);
    const char *needs = e->is_float[i] ? "a number" : "an integer";
    if (PyErr_Occurred()) PyErr_Clear();
    else if (*n == (int32_t)*n) return 0;
    else needs = "an integer of 32 bits";
    return REFUSE(e, "%s is %R; need %s; pass such a number",
                  text_of(e->names, e->tensors + i), x, needs);
}

static int take(const Entry *e, PyObject *const *arguments, Py_ssize_t n, Given *g) {
    if (n != e->tensors + e->scalars)
        return RAISE(PyExc_TypeError, e,
                     "%zd arguments; need %d tensors and %d scalars; pass those", n, e->tensors,
                     e->scalars);
    for (int i = 0; i < e->tensors; i++)
        if (take_tensor(e, i, arguments[e->tensor_at[i]], g)) return -1;
    for (int i = 0; i < e->scalars; i++)
        if (take_scalar(e, i, arguments[e->scalar_at[i]], g)) return -1;
    return 0;
}

/* ---- bind: every number of the launch ---- */

static int64_t evaluate(Expression code, const int64_t *values) { /* checked by `read_expression` */
    int64_t stack[DEPTH];
    int n = 0;
    for (; *code != END; code++) {
        if (*code == CONSTANT) { stack[n++] = *++code; continue; }
        if (*code == SYMBOL) { stack[n++] = values[*++code]; continue; }
        int64_t b = stack[--n], *a = &stack[n - 1];
        switch (*code) { /* unsigned: overflow wraps */
            case ADD: *a = (int64_t)((uint64_t)*a + (uint64_t)b); break;
            case SUB: *a = (int64_t)((uint64_t)*a - (uint64_t)b); break;
            case MUL: *a = (int64_t)((uint64_t)*a * (uint64_t)b); break;
            case FLOORDIV: *a = b > 0 ? *a / b : 0; break; /* of sizes: a >= 0 */
            case SHIFT: *a >>= b & 63; break;
        }
    }
    return stack[0];
}

static int refuse_dtype(const Entry *e, int i, PyObject *x) {
    PyObject *got = PyObject_GetAttr(x, torch.dtype);
    const char *needs = text_of(e->names, e->tensors + e->scalars + i);
    if (got) REFUSE(e, "%s is %S; need %s" SUCH_A_TENSOR, text_of(e->names, i), got, needs);
    Py_XDECREF(got);
    return -1;
}

static int check_tensor(const Entry *e, int i, const Given *g, PyObject *x) {
    const DLTensor *t = &g->tensor[i];
    int first = g->tensor[0].device.id;
    if (t->ndim != e->ndim[i])
        return REFUSE(e, "%s has %d dimensions; need %d" SUCH_A_TENSOR, text_of(e->names, i),
                      t->ndim, e->ndim[i]);
    if (memcmp(&t->dtype, &e->dtype[i], sizeof t->dtype)) return refuse_dtype(e, i, x);
    if (t->device.type != torch.device_type)
        return refuse_tensor(e, i, "is not on a GPU", "a CUDA tensor");
    if (t->device.id != first)
        return REFUSE(e, "%s is on GPU %d; need GPU %d, where %s is" SUCH_A_TENSOR,
                      text_of(e->names, i), t->device.id, first, text_of(e->names, 0));
    if (t->data) return 0;
    for (int d = 0; d < t->ndim; d++) if (!t->shape[d]) return 0;
    return refuse_tensor(e, i, "has no memory", "a tensor with memory");
}

static int64_t read_place(const Place *p, const Given *g) {
    const DLTensor *t = &g->tensor[p->tensor];
    return (p->what == SIZE ? t->shape : t->strides)[p->axis];
}

static int read_symbols(const Entry *e, Given *g) {
    for (int i = 0; i < e->symbols; i++) {
        const Place *p = &e->symbol[i];
        int64_t n = read_place(p, g);
        if (n != (int32_t)n) {
            /* torch sets any stride along an axis of one element, and it is not used */
            if (p->what == SIZE || g->tensor[p->tensor].shape[p->axis] > 1)
                return refuse_place(e, p, e->checks + i, n, INT32_MAX);
            n = (int32_t)n;
        }
        g->value[i] = n;
    }
    return 0;
}

static int compare_places(const Entry *e, const Given *g) {
    for (int i = 0; i < e->checks; i++) {
        const Place *p = &e->check[i];
        int64_t got = read_place(p, g), expected = evaluate(p->expected, g->value);
        if (got == expected) continue;
        /* strides count only along axes of several elements, of tensors with any */
        int64_t size = g->tensor[p->tensor].shape[p->axis];
        if (p->what == STRIDE && (expected == 0 || size == 1)) continue;
        return refuse_place(e, p, i, got, expected);
    }
    return 0;
}

static int bind_arguments(const Entry *e, const Given *g, Launch *l) {
    for (int i = 0; i < e->arguments; i++) {
        if (e->kind[i] == FLOAT32) l->scalar[i].f = g->real[e->index[i]];
        if (e->kind[i] != INT32) continue;
        int64_t n = evaluate(e->value[i], g->value);
        if (n != (int32_t)n) return refuse_number(e, "a product of sizes", n);
        l->scalar[i].i = (int32_t)n;
    }
    for (int m = 0; m < e->maps; m++) {
        const MapSpec *s = &e->map[m];
        for (int d = 0; d < s->rank; d++)
            l->dims[m][d] = (uint64_t)evaluate(s->dims[d], g->value);
        for (int d = 0; d + 1 < s->rank; d++)
            l->strides[m][d] = (uint64_t)evaluate(s->strides[d], g->value);
    }
    return 0;
}

static int bind_numbers(const Entry *e, Given *g, Launch *l) {
    if (read_symbols(e, g) || compare_places(e, g)) return -1;
    for (int i = 0; i < 7; i++) {
        int64_t n = evaluate(e->launch[i], g->value);
        if (n < (i < 6) || n > INT32_MAX) /* a grid has at least one CTA */
            return REFUSE(e, "a launch of %lld CTAs along %c; need 1 to %d; launch where there is"
                          " work", (long long)n, "xyzxyz "[i], INT32_MAX);
        l->config.numbers[i] = (unsigned)n;
    }
    l->attribute = (Attribute){.id = PROGRAMMATIC_SERIALIZATION, .value.programmatic = 1};
    l->config.num_attributes = e->dependent ? 1 : 0;
    return bind_arguments(e, g, l);
}

static int bind(const Entry *e, PyObject *const *arguments, Given *g, Launch *l) {
    for (int i = 0; i < e->tensors; i++)
        if (check_tensor(e, i, g, arguments[e->tensor_at[i]])) return -1;
    return bind_numbers(e, g, l);
}

/* ---- start: without the GIL, so that a full queue holds up no other thread ---- */

typedef struct { const char *step; int error, map; } Outcome;
#define TRY(o, function, ...) \
    (((o)->error = driver.function(__VA_ARGS__)) ? ((o)->step = #function, -1) : 0)

/* In the device's context, under the lock. */
static int load_on(Entry *e, int device, unsigned shared, Outcome *o) {
    void *library, *function;
    kernels_loaded = 1;
    if (!e->kernel) {
        if (TRY(o, cuLibraryLoadData, &library, e->cubin, 0, 0, 0, 0, 0, 0)) return -1;
        if (TRY(o, cuLibraryGetKernel, &e->kernel, library, e->function)) return -1;
    }
    if (TRY(o, cuKernelSetAttribute, MAX_DYNAMIC_SHARED, (int)shared, e->kernel, device)) return -1;
    return TRY(o, cuKernelGetFunction, &function, e->kernel); /* loads now what may load lazily */
}

/* A stream that is being captured refuses what loading may do, unless this thread asks for less. */
static int load_uncaptured(Entry *e, int device, unsigned shared, Outcome *o) {
    int mode = CAPTURE_RELAXED;
    if (TRY(o, cuThreadExchangeStreamCaptureMode, &mode)) return -1;
    int failed = load_on(e, device, shared, o);
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    return failed;
}

static int ready(Entry *e, int device, unsigned shared, Outcome *o) {
    if (atomic_load_explicit(&e->ready[device], memory_order_acquire)) return 0;
    pthread_mutex_lock(&loading);
    int failed = !e->ready[device] && load_uncaptured(e, device, shared, o);
    if (!failed) atomic_store_explicit(&e->ready[device], 1, memory_order_release);
    pthread_mutex_unlock(&loading);
    return failed;
}

static int enqueue(Entry *e, const Launch *l, void *const *address, void *stream, Outcome *o) {
    TensorMap maps[MAPS];
    void *pointers[ARGUMENTS], *arguments[ARGUMENTS];
    for (o->map = 0; o->map < e->maps; o->map++) {
        const MapSpec *s = &e->map[o->map];
        if (TRY(o, cuTensorMapEncodeTiled, &maps[o->map], s->dtype, (unsigned)s->rank,
                address[s->tensor], l->dims[o->map], l->strides[o->map], s->box, s->steps,
                s->interleave, s->swizzle, s->l2, s->fill)) return -1;
    }
    for (int i = 0; i < e->arguments; i++) {
        pointers[i] = e->kind[i] == POINTER ? address[e->index[i]] : NULL;
        arguments[i] = e->kind[i] == POINTER ? (void *)&pointers[i]
                     : e->kind[i] == MAP ? (void *)&maps[e->index[i]] : (void *)&l->scalar[i];
    }
    LaunchConfig config = l->config;
    Attribute attribute = l->attribute;
    config.stream = stream, config.attributes = &attribute;
    return TRY(o, cuLaunchKernelEx, &config, e->kernel, arguments, NULL);
}

/* Makes the device's primary context current, if another one is; 1 if it has to be taken back. */
static int enter(int device, Outcome *o) {
    int current;
    if (driver.cuCtxGetDevice(&current) == 0 && current == device) return 0;
    pthread_mutex_lock(&loading);
    void **primary = &primary_context[device];
    int failed = !*primary && TRY(o, cuDevicePrimaryCtxRetain, primary, device);
    pthread_mutex_unlock(&loading);
    return failed || TRY(o, cuCtxPushCurrent_v2, *primary) ? -1 : 1;
}

static int explain(const Entry *e, const Outcome *o) {
    if (strcmp(o->step, "cuTensorMapEncodeTiled") == 0)
        return REFUSE(e, "no tensor map of %s; need an address and strides that are multiples of 16"
                      " bytes, and no size of 0; pass a contiguous copy",
                      text_of(e->names, e->map[o->map].tensor));
    const char *name = "an unknown error";
    driver.cuGetErrorName(o->error, &name);
    return RAISE(PyExc_RuntimeError, e, "%s gave %s (%d); need a driver of R525 or newer, and no"
                 " earlier kernel that failed; look for that one with CUDA_LAUNCH_BLOCKING=1",
                 o->step, name, o->error);
}

static int start(Entry *e, const Launch *l, void *const *address, int device, void *stream) {
    Outcome o = {0};
    PyThreadState *thread = PyEval_SaveThread();
    int entered = enter(device, &o);
    int failed = entered < 0 || ready(e, device, l->config.numbers[6], &o)
                 || enqueue(e, l, address, stream, &o);
    if (entered > 0) { void *left; driver.cuCtxPopCurrent_v2(&left); }
    PyEval_RestoreThread(thread);
    return failed ? explain(e, &o) : 0;
}

static int open_driver(void) {
    if (driver_opened) return 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const char *missing = library ? NULL : "libcuda.so.1";
    void **slot = (void **)&driver;
    for (size_t i = 0; !missing && i < sizeof DRIVER_NAMES / sizeof *DRIVER_NAMES; i++)
        if (!(slot[i] = dlsym(library, DRIVER_NAMES[i]))) missing = DRIVER_NAMES[i];
    if (missing) {
        PyErr_Format(PyExc_RuntimeError, "qla_kernels: no %s; need the NVIDIA driver, R525 or"
                     " newer; install or update it", missing);
        return -1;
    }
    driver_opened = 1;
    return 0;
}

static int stream_of(int device, void **stream) {
    *stream = NULL;
    if (torch.device_type != CUDA) return 0;
    if (torch.api) return torch.api->current_stream(CUDA, device, stream);
    *stream = (void *)(intptr_t)integer_of(PyObject_CallFunction(torch.stream, "i", device));
    return PyErr_Occurred() ? -1 : 0;
}

static int may_launch(const Entry *e, int device) {
    if (forked)
        return RAISE(PyExc_RuntimeError, e, "%s", "this process was forked from one that had used"
                     " CUDA; need a process of its own; start it with multiprocessing's spawn");
    if (device >= MAX_DEVICES)
        return REFUSE(e, "GPU %d; need one below %d; use that", device, MAX_DEVICES);
    return open_driver();
}

/* ---- reading arrays of numbers ---- */

typedef struct { const int64_t *at, *end; int bad; } Reader;

static int64_t next(Reader *r) {
    if (r->at < r->end) return *r->at++;
    r->bad = 1;
    return 0;
}

static int below(Reader *r, int limit) { /* an index or a count */
    int64_t n = next(r);
    if (n >= 0 && n < limit) return (int)n;
    r->bad = 1;
    return 0;
}

#include "programs.c"
#include "plans.c"

static PyObject *call(PyObject *self, PyObject *const *arguments, Py_ssize_t n) {
    Entry *e = PyCapsule_GetPointer(self, "entry");
    Given given; Launch launch; void *address[TENSORS], *stream;
    if (noted)
        return stream_of(noting, &stream) || note_launch(self, stream, arguments, n) ? NULL
                                                                                     : Py_BuildValue("");
    if (!e || take(e, arguments, n, &given) || bind(e, arguments, &given, &launch)) return NULL;
    int device = given.tensor[0].device.id;
    if (may_launch(e, device) || stream_of(device, &stream)) return NULL;
    for (int i = 0; i < e->tensors; i++) address[i] = given.tensor[i].data;
    if (start(e, &launch, address, device, stream)) return NULL;
    Py_RETURN_NONE;
}

/* ---- reading an entry ---- */

static Expression read_expression(Reader *r, int symbols) {
    Expression first = r->at;
    int depth = 0, code;
    while ((code = below(r, NUM_CODES)) != END && !r->bad) {
        if (code == CONSTANT) { next(r); depth++; }
        else if (code == SYMBOL) { below(r, symbols); depth++; }
        else if (--depth < 1) r->bad = 1;
        if (depth >= DEPTH) r->bad = 1;
    }
    if (depth != 1) r->bad = 1;
    return first;
}

static Place read_place_of(Reader *r, const Entry *e) {
    Place p = {0};
    p.tensor = below(r, e->tensors), p.what = below(r, 2), p.axis = below(r, e->ndim[p.tensor]);
    return p;
}

static void read_map(Reader *r, const Entry *e, MapSpec *s, int symbols) {
    s->tensor = below(r, e->tensors), s->rank = below(r, RANK + 1);
    int *const flags[] = {&s->dtype, &s->interleave, &s->swizzle, &s->l2, &s->fill};
    for (int i = 0; i < 5; i++) *flags[i] = (int)next(r);
    for (int i = 0; i < s->rank; i++) s->box[i] = (unsigned)next(r);
    for (int i = 0; i < s->rank; i++) s->steps[i] = (unsigned)next(r);
    for (int i = 0; i < s->rank; i++) s->dims[i] = read_expression(r, symbols);
    for (int i = 0; i + 1 < s->rank; i++) s->strides[i] = read_expression(r, symbols);
}

static int read_entry(Entry *e, Reader *r) { /* what pack.py wrote, in its order */
    e->tensors = below(r, TENSORS + 1), e->scalars = below(r, SCALARS + 1);
    e->symbols = below(r, SYMBOLS + 1), e->checks = below(r, CHECKS + 1);
    e->maps = below(r, MAPS + 1), e->arguments = below(r, ARGUMENTS + 1);
    e->dependent = below(r, 2);
    int places = e->tensors + e->scalars, symbols = e->symbols + e->scalars;
    for (int i = 0; i < e->tensors; i++) {
        e->tensor_at[i] = below(r, places), e->ndim[i] = below(r, DIMENSIONS + 1);
        uint8_t code = (uint8_t)next(r), bits = (uint8_t)next(r);
        e->dtype[i] = (DLDataType){code, bits, 1};
    }
    for (int i = 0; i < e->scalars; i++)
        e->scalar_at[i] = below(r, places), e->is_float[i] = below(r, 2);
    for (int i = 0; i < e->symbols; i++) e->symbol[i] = read_place_of(r, e);
    for (int i = 0; i < e->checks; i++) {
        e->check[i] = read_place_of(r, e);
        e->check[i].expected = read_expression(r, symbols);
    }
    for (int i = 0; i < 7; i++) e->launch[i] = read_expression(r, symbols);
    const int limit[] = {[POINTER] = e->tensors, [MAP] = e->maps, [FLOAT32] = e->scalars};
    for (int i = 0; i < e->arguments; i++) {
        e->kind[i] = below(r, NUM_KINDS);
        if (e->kind[i] == INT32) e->value[i] = read_expression(r, symbols);
        else e->index[i] = below(r, limit[e->kind[i]]);
    }
    for (int m = 0; m < e->maps; m++) read_map(r, e, &e->map[m], symbols);
    return r->bad || !e->tensors || r->at != r->end ? -1 : 0;
}

static void drop_entry(PyObject *capsule) {
    Entry *e = PyCapsule_GetPointer(capsule, "entry");
    Py_XDECREF(e->held);
    PyMem_Free(e);
}

/* launcher(label, function, cubin, numbers, names, needs) -> a function of tensors and scalars.
   names: of tensors, of scalars, of the tensors' dtypes; needs: texts of checks, then of symbols */
static PyObject *make_launcher(PyObject *self, PyObject *args) {
    const char *label, *function, *cubin, *numbers;
    Py_ssize_t cubin_size, size;
    PyObject *names, *needs;
    if (!PyArg_ParseTuple(args, "ssy#y#O!O!", &label, &function, &cubin, &cubin_size, &numbers,
                          &size, &PyTuple_Type, &names, &PyTuple_Type, &needs)) return NULL;
    Entry *e = PyMem_Calloc(1, sizeof *e);
    if (!e) return PyErr_NoMemory();
    Reader reader = {(const int64_t *)numbers, (const int64_t *)(numbers + size - size % 8), 0};
    if (read_entry(e, &reader) || PyTuple_Size(names) != 2 * e->tensors + e->scalars
        || PyTuple_Size(needs) != e->checks + e->symbols) {
        PyErr_Format(PyExc_ValueError, "%s: an entry that this launcher cannot read", label);
        PyMem_Free(e);
        return NULL;
    }
    e->label = label, e->function = function, e->cubin = cubin, e->names = names, e->needs = needs;
    Py_INCREF(args);
    e->held = args; /* the tuple keeps every argument, and with them the memory pointed into */
    PyCFunction function_of_call = (PyCFunction)(void (*)(void))call;
    e->method = (PyMethodDef){label, function_of_call, METH_FASTCALL, "Launches the kernel."};
    PyObject *capsule = PyCapsule_New(e, "entry", drop_entry);
    PyObject *made = capsule ? PyCFunction_NewEx(&e->method, capsule, NULL) : NULL;
    Py_XDECREF(capsule);
    return made;
}

/* configure(exchange capsule or None, torch.Tensor, stream, dtypes, device type) */
static PyObject *configure(PyObject *self, PyObject *args) {
    PyObject *exchange, *tensor, *stream, *dtypes;
    int type;
    if (!PyArg_ParseTuple(args, "OOOOi", &exchange, &tensor, &stream, &dtypes, &type)) return NULL;
    const ExchangeApi *api = NULL;
    if (exchange != Py_None && !(api = PyCapsule_GetPointer(exchange, "dlpack_exchange_api")))
        return NULL;
    if (api && api->major != 1) api = NULL; /* another layout: ask through Python */
    Py_INCREF(args); /* for the life of the process: the tuple keeps all of these */
    torch.api = api, torch.tensor_type = tensor, torch.device_type = type;
    torch.stream = stream, torch.dtypes = dtypes;
    PyObject **const to[] = {&torch.data_ptr, &torch.shape, &torch.stride,
                             &torch.dtype, &torch.get_device, &torch.is_cuda};
    const char *const names[] = {"data_ptr", "shape", "stride", "dtype", "get_device", "is_cuda"};
    for (int i = 0; i < 6; i++)
        if (!*to[i] && !(*to[i] = PyUnicode_InternFromString(names[i]))) return NULL;
    return PyBool_FromLong(api != NULL);
}

static PyObject *exchanges(PyObject *self, PyObject *none) {
    return PyBool_FromLong(torch.api != NULL);
}

static PyObject *driver_version(PyObject *self, PyObject *none) {
    int version = 0;
    if (open_driver()) return NULL;
    driver.cuDriverGetVersion(&version);
    return PyLong_FromLong(version);
}

static PyMethodDef methods[] = {
    {"launcher", make_launcher, METH_VARARGS, "Returns a function that launches one entry."},
    {"configure", configure, METH_VARARGS, "Says how to talk to torch; returns whether by DLPack."},
    {"exchanges", exchanges, METH_NOARGS, "Returns whether torch has DLPack's exchange API."},
    {"driver_version", driver_version, METH_NOARGS, "Returns the driver's CUDA version: 13000."},
    {"watch_with", watch_with, METH_VARARGS, "Says how to ask torch whether a call is observed."},
    {"table", make_table, METH_VARARGS, "Returns a function that replays calls that are known."},
    {"note", note_launches, METH_VARARGS, "Appends this thread's launches to a list, if any."},
    {"store", store, METH_VARARGS, "Launches a program, and keeps it for calls like this one."},
    {"keep", keep, METH_VARARGS, "Stores a value for calls that look like this one."},
    {"num_programs", num_programs, METH_O, "Returns how many programs and values a table has."},
    {"plan_with", plan_with, METH_O, "Takes the constants of the model of times."},
    {"plans", (PyCFunction)(void (*)(void))plans, METH_FASTCALL, "Returns how a batch of known lengths is planned."},
    {"num_replays", num_replays, METH_O, "Returns how many calls a table has replayed."},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_launcher(void) {
    static int registered;
    if (!registered && pthread_atfork(NULL, NULL, in_child_of_fork)) return PyErr_NoMemory();
    registered = 1;
    return PyModule_Create(&module);
}
