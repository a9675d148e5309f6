/* A stand-in for libcuda.so.1 and libcudart.so.13 on a machine without a GPU: it launches nothing and
   writes down what each launch was given. As much of both libraries as TileLang's runtime and
   qla_kernels/runtime/native/launcher.c call. Built and preloaded by tests/native/standin.py. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK, INVALID_VALUE = 1, INVALID_HANDLE = 400, INVALID_CONTEXT = 201, CAPTURE_UNSUPPORTED = 900, RELAXED = 2 };

/* ---- what tests set and read ---- */

int standin_capturing;        /* a stream is being captured: nothing may be loaded, but in relaxed mode */
int standin_no_context;       /* no context is current in any thread */
int standin_loads, standin_pushes, standin_pops;
int standin_fail;             /* the next launch gives this error */
int standin_still;            /* fills and copies leave memory as it is */
int standin_full;             /* fills and copies are written down with their numbers, and allocations */
static char kinds[256];       /* of the next launches' arguments: p pointer, m map, i int32, f float32 */
static unsigned char record[1 << 20];
static int used;

void standin_expect(const char *letters) { strncpy(kinds, letters, sizeof kinds - 1); used = 0; }
int standin_record(void *to) { memcpy(to, record, (size_t)used); return used; }

static void put(const void *from, size_t size) {
    if (used + size > sizeof record) return;
    memcpy(record + used, from, size);
    used += (int)size;
}
void standin_note(const char *name, uint64_t first, uint64_t second) { /* between launches, by tests */
    put(name, strlen(name) + 1);
    put(&first, sizeof first);
    put(&second, sizeof second);
}

/* ---- devices and contexts ---- */

static __thread int current_device, stack[8], depth, mode;
typedef struct { int device; } Context;
static Context contexts[8];

int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuCtxGetDevice(int *device) { *device = current_device; return standin_no_context && !depth ? INVALID_CONTEXT : OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { contexts[device].device = device; *context = &contexts[device]; return OK; }
int cuCtxPushCurrent_v2(void *context) {
    standin_pushes++;
    stack[depth++] = current_device;
    current_device = ((Context *)context)->device;
    return OK;
}
int cuCtxPopCurrent_v2(void **context) { standin_pops++; current_device = stack[--depth]; return OK; }
int cuThreadExchangeStreamCaptureMode(int *next) { int old = mode; mode = *next; *next = old; return OK; }
int standin_mode(void) { return mode; } /* of the calling thread */
int cuGetErrorName(int error, const char **name) { *name = error == CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "CUDA_ERROR_INVALID_VALUE"; return OK; }
int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

/* ---- modules and libraries: a function is a record of its name ---- */

typedef struct { char name[128]; int max_shared; } Function;

static int function_of(void **out, const char *name) {
    Function *f = calloc(1, sizeof *f);
    strncpy(f->name, name, sizeof f->name - 1);
    f->max_shared = 48 * 1024;
    *out = f;
    return OK;
}
static int may_load(void) { return standin_capturing && mode != RELAXED ? CAPTURE_UNSUPPORTED : OK; }

int cuModuleLoadData(void **module, const void *image) { *module = (void *)image; return may_load(); }
int cuModuleGetFunction(void **f, void *module, const char *name) { return function_of(f, name); }
int cuModuleUnload(void *module) { return OK; }
int cuFuncSetAttribute(void *f, int attribute, int value) { if (attribute == 8) ((Function *)f)->max_shared = value; return OK; }
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned g) {
    if (__sync_fetch_and_add(&standin_loads, 1) == 0) usleep(10000); /* other threads come */
    *library = (void *)code;
    return memcmp(code, "\177ELF", 4) ? INVALID_VALUE : may_load();
}
int cuLibraryGetKernel(void **f, void *library, const char *name) { return function_of(f, name); }
int cuKernelSetAttribute(int attribute, int value, void *f, int device) { return cuFuncSetAttribute(f, attribute, value); }
int cuKernelGetFunction(void **f, void *kernel) { *f = kernel; return may_load(); }

/* ---- tensor maps: the arguments themselves, in the 128 bytes ---- */

typedef struct {
    uint64_t address, dims[5], strides[4];
    uint16_t box[5];
    uint8_t steps[5], dtype, rank, interleave, swizzle, l2, fill;
} Map;
_Static_assert(sizeof(Map) <= 128, "a tensor map has 128 bytes");

int cuTensorMapEncodeTiled(void *out, int dtype, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave, int swizzle, int l2, int fill) {
    Map m;
    memset(&m, 0, sizeof m);
    m.address = (uint64_t)address, m.dtype = dtype, m.rank = rank;
    m.interleave = interleave, m.swizzle = swizzle, m.l2 = l2, m.fill = fill;
    if (m.address % 16) return INVALID_VALUE;
    for (unsigned i = 0; i < rank; i++) {
        m.dims[i] = dims[i], m.box[i] = box[i], m.steps[i] = steps[i];
        if (!dims[i] || !box[i] || box[i] > 256) return INVALID_VALUE;
        if (i + 1 < rank && (m.strides[i] = strides[i]) % 16) return INVALID_VALUE;
    }
    memset(out, 0, 128);
    memcpy(out, &m, sizeof m);
    return OK;
}

/* ---- launches ---- */

static int launch(Function *f, const unsigned *numbers, void *stream, int dependent, void **arguments) {
    if (standin_fail) { int error = standin_fail; standin_fail = 0; return error; }
    if (numbers[6] > (unsigned)f->max_shared) return INVALID_VALUE;
    put(f->name, strlen(f->name) + 1);
    put(numbers, 7 * sizeof *numbers);
    put(&stream, sizeof stream);
    put(&dependent, sizeof dependent);
    const char *own = strchr(f->name, '|'), *letters = own ? own + 1 : kinds; /* a name may have them */
    for (int i = 0; letters[i]; i++) put(arguments[i], letters[i] == 'm' ? 128 : letters[i] == 'p' ? 8 : 4);
    return OK;
}
/* ---- events: written down like launches ---- */

int standin_events;                  /* not destroyed yet */
static int put_event(const char *name, void *event, void *stream) {
    put(name, strlen(name) + 1);
    put(&event, sizeof event);
    put(&stream, sizeof stream);
    return OK;
}
extern int standin_gpu;
int cuEventCreate(void **event, unsigned flags) { /* in the current context, as its streams are */
    standin_events++;
    *event = malloc(sizeof(int));
    **(int **)event = current_device;
    return OK;
}
int cuEventDestroy_v2(void *event) { standin_events--; free(event); return OK; }
int cuEventRecord(void *event, void *stream) {
    return *(int *)event == standin_gpu ? put_event("record", event, stream) : INVALID_HANDLE;
}
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return put_event("wait", event, stream); }
static int put_fill(void *to, unsigned value, size_t n, void *stream) {
    put_event("fill", to, stream);
    if (standin_full) put(&value, sizeof value), put(&n, sizeof n);
    return OK;
}
int cuMemsetD8Async(void *to, unsigned char value, size_t n, void *stream) {
    if (!standin_still) memset(to, value, n);
    return put_fill(to, value * 0x01010101u, n, stream);
}
int cuMemsetD32Async(void *to, unsigned value, size_t n, void *stream) {
    for (size_t i = 0; !standin_still && i < n; i++) ((unsigned *)to)[i] = value;
    return put_fill(to, value, 4 * n, stream);
}
typedef struct {
    size_t from_x, from_y; unsigned from_type; const void *from_host; char *from; void *from_array;
    size_t from_pitch, to_x, to_y; unsigned to_type; void *to_host; char *to; void *to_array;
    size_t to_pitch, width, height;
} Copy;
int cuMemcpy2DAsync_v2(const Copy *c, void *stream) {
    for (size_t i = 0; !standin_still && i < c->height; i++)
        memcpy(c->to + i * c->to_pitch, c->from + i * c->from_pitch, c->width);
    put_event("copy", c->to, stream);
    size_t numbers[] = {(size_t)c->from, c->to_pitch, c->from_pitch, c->width, c->height};
    if (standin_full) put(numbers, sizeof numbers);
    return OK;
}
int cuStreamIsCapturing(void *stream, int *status) { *status = standin_capturing; return OK; }

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
    unsigned numbers[] = {gx, gy, gz, bx, by, bz, shared};
    return launch(f, numbers, stream, 0, arguments);
}
typedef struct { unsigned id; char pad[4]; union { int programmatic; char room[64]; } value; } Attribute;
typedef struct { unsigned numbers[7]; void *stream; Attribute *attributes; unsigned num_attributes; } Config;
int cuLaunchKernelEx(const Config *c, void *f, void **arguments, void **extra) {
    int dependent = 0;
    for (unsigned i = 0; i < c->num_attributes; i++) { /* 6: programmatic stream serialization */
        if (c->attributes[i].id != 6) return INVALID_VALUE;
        dependent = c->attributes[i].value.programmatic;
    }
    return launch(f, c->numbers, c->stream, dependent, arguments);
}

/* ---- tensors of the CPU that pass for a GPU's: torch's exchange API, with another device ---- */

typedef struct { int32_t type, id; } Device;
typedef struct {
    char *data; Device device; int32_t dims; uint8_t code, bits; uint16_t lanes;
    int64_t *shape, *strides; uint64_t byte_offset;
} Tensor;
typedef struct { /* as in launcher.c */
    uint32_t major, minor; void *previous;
    int (*allocate)(Tensor *like, void **out, void *context, void *error);
    void *managed_from_python;
    int (*to_python)(void *tensor, void **out);
    int (*from_python)(void *object, Tensor *out);
    int (*current_stream)(int32_t type, int32_t id, void **out);
} Exchange;
enum { CPU = 1, CUDA = 2, MOST_ON_HOST = 64 };
static const Exchange *of_torch;
static struct { char *begin, *end; } on_host[MOST_ON_HOST];
static int num_on_host;
int standin_stream; /* the current one */
int standin_gpu;    /* the one that tensors pass to be on */

/* Of all tensors, those in this memory are the host's. Without memory, none is. */
int standin_on_host(char *begin, uint64_t size) {
    if (!begin) num_on_host = 0;
    else if (num_on_host == MOST_ON_HOST) return 0;
    else on_host[num_on_host].begin = begin, on_host[num_on_host++].end = begin + size;
    return 1;
}
int standin_is_on_host(const char *at) {
    for (int i = 0; i < num_on_host; i++)
        if (at >= on_host[i].begin && at < on_host[i].end) return 1;
    return 0;
}
static int allocate(Tensor *like, void **out, void *context, void *error) {
    Tensor there = *like;
    there.device.type = CPU, there.device.id = 0;
    int failed = of_torch->allocate(&there, out, context, error);
    if (failed || !standin_full) return failed;
    uint64_t size = like->bits / 8;
    for (int i = 0; i < like->dims; i++) size *= (uint64_t)like->shape[i];
    const Tensor *made = (const Tensor *)((char *)*out + 32); /* in a DLManagedTensorVersioned */
    standin_note("alloc", (uint64_t)(made->data + made->byte_offset), size);
    return OK;
}
static int from_python(void *object, Tensor *out) {
    int failed = of_torch->from_python(object, out);
    if (!failed && !standin_is_on_host(out->data + out->byte_offset))
        out->device.type = CUDA, out->device.id = standin_gpu;
    return failed;
}
static int current_stream(int32_t type, int32_t id, void **out) { *out = (void *)(intptr_t)standin_stream; return OK; }
void *standin_exchange(const Exchange *from) {
    static Exchange made;
    of_torch = from, made = *from;
    made.allocate = allocate, made.from_python = from_python, made.current_stream = current_stream;
    return &made;
}

/* ---- the rest of what TileLang's runtime looks up ---- */

#define NOTHING(name) int name() { return OK; }
NOTHING(cuDeviceGetName) NOTHING(cuDeviceGetAttribute) NOTHING(cuCtxGetLimit) NOTHING(cuCtxSetLimit)
NOTHING(cuCtxResetPersistingL2Cache) NOTHING(cuStreamSetAttribute) NOTHING(cuTensorMapEncodeIm2col)
NOTHING(cuLaunchCooperativeKernel) NOTHING(cuModuleLoadDataEx) NOTHING(cuModuleGetGlobal_v2) NOTHING(cuMemsetD32_v2)
NOTHING(cudaDeviceSynchronize) NOTHING(cudaEventCreate) NOTHING(cudaEventDestroy) NOTHING(cudaEventElapsedTime)
NOTHING(cudaEventRecord) NOTHING(cudaEventSynchronize) NOTHING(cudaFree) NOTHING(cudaFreeHost) NOTHING(cudaFuncSetAttribute)
NOTHING(cudaGetLastError) NOTHING(cudaPeekAtLastError) NOTHING(cudaGraphDestroy) NOTHING(cudaGraphExecDestroy)
NOTHING(cudaGraphInstantiate) NOTHING(cudaGraphLaunch) NOTHING(cudaIpcCloseMemHandle) NOTHING(cudaIpcGetMemHandle)
NOTHING(cudaIpcOpenMemHandle) NOTHING(cudaMalloc) NOTHING(cudaMallocHost) NOTHING(cudaMemGetInfo) NOTHING(cudaMemcpy)
NOTHING(cudaMemcpyAsync) NOTHING(cudaMemcpyPeerAsync) NOTHING(cudaMemset) NOTHING(cudaMemsetAsync)
NOTHING(cudaStreamBeginCapture) NOTHING(cudaStreamCreate) NOTHING(cudaStreamCreateWithFlags) NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamEndCapture) NOTHING(cudaStreamSynchronize) NOTHING(cudaStreamWaitEvent) NOTHING(cudaGetDeviceProperties)
int cudaGetDevice(int *device) { *device = current_device; return OK; }
int cudaSetDevice(int device) { current_device = device; return OK; }
int cudaGetDeviceCount(int *count) { *count = 2; return OK; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return OK; }
const char *cudaGetErrorString(int error) { return "stand-in"; }
