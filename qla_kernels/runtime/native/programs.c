/* Programs: whole calls, replayed. Included by launcher.c.

   A program is what a call does on the GPU: launches, fills, copies, waits between two streams.
   trace.py makes it by running launch code on placeholders. It is found again by what the call's
   arguments look like: sizes, strides, dtypes, alignment, flags, the numbers in tensors of the host,
   and torch's current stream. Whatever launch code decides depends on these alone. So a replay
   checks nothing again: it allocates the results and one workspace, fills in addresses, and
   launches. A form is a program in which the number of tokens is open; forms.c makes programs of it.

   A table holds the programs of one function. It is called with the function's arguments and
   returns

     None     run the function: this is the first such call, or an argument cannot be compared,
              or a mode of torch observes the call
     True     make the program and launch it, by `store`: this is the second such call
     a tuple  the results: the program has been launched
     else     the value that `keep` stored for such calls */

enum { KEY = 4096, INPUTS = 64, RESULTS = 24, CONSTANTS = 16, NESTED = 2 };
enum { BUCKETS = 256, SEEN = 1024, HOST_BYTES = 16384, TEXT = 256, ALIGNMENT = 16 };
enum { KEY_NONE = 1, KEY_FALSE, KEY_TRUE, KEY_INT, KEY_FLOAT, KEY_TEXT, KEY_LIST, KEY_TENSOR };
enum { BASES = INPUTS + RESULTS + 1 + CONSTANTS };
enum { FLOAT_CODE = 2 }; /* DLPack: integers are below */
enum { EVENT_WITHOUT_TIME = 2, NOT_ASKED = -1, OPEN = -1 };

typedef struct { /* what a call looks like */
    int words, tensors, first, gradients; /* first: tensor on the GPU, or -1 */
    int64_t word[KEY];
    DLTensor tensor[INPUTS];
    PyObject *object[INPUTS]; /* of these tensors; borrowed */
    void *stream;
    int64_t tokens;              /* T: the size along axis 1 of the first tensor that has tokens */
    int num_open, open[2 * INPUTS]; /* words that follow from T; see `turn` */
    int64_t instead[2 * INPUTS];
} Sight;
typedef struct { int ndim; DLDataType dtype; int64_t shape[DIMENSIONS]; } Output; /* contiguous */
enum { LAUNCH, WAIT, FILL, COPY }; /* recording.py has the same */
enum { DEVICE_MEMORY = 2 };
typedef struct {
    int kind;
    Entry *entry; Launch launch;
    int stream, other; /* 0: the caller's; 1: other_stream. `stream` waits for `other` */
    void *event;
    int64_t value, bytes; /* FILL: of 32 bits each, or of 8 if value is 0 */
    int64_t width, height, to_pitch, from_pitch; /* COPY: as in cuMemcpy2D */
    int base[TENSORS]; int64_t offset[TENSORS]; /* of each address */
} Step;
typedef struct Program {
    struct Program *next;
    uint64_t hash, used;
    int words, running;  /* running: threads that replay it, which is done without the GIL */
    int64_t *key;
    PyObject *value;     /* of `keep`; NULL: launches */
    PyObject *held;      /* what constants, streams and entries belong to */
    PyObject *events;    /* a list of capsules, which programs of one form share */
    PyObject *code, *tables; /* of a form, forms.c; its key has marks in place of T */
    int inputs, outputs, results, constants, steps;
    Output output[RESULTS];
    int result[RESULTS]; /* an output, or -1 for None */
    uint64_t written;    /* bits: inputs whose version counts the call as a write */
    int64_t workspace;
    void *constant[CONSTANTS], *other_stream;
    Step *step;
} Program;
typedef struct {
    PyMethodDef method;
    int most, num, gradients;
    uint64_t tokens;     /* bits: the places of arguments that have tokens along axis 1 */
    long long replays;
    uint64_t clock, seen[SEEN];
    Program *bucket[BUCKETS];
} Table;

static struct {
    PyObject *parameter_type, *grad_enabled, *modes, *functorch, *tracing, *forward_ad;
    PyObject *increment_version, *requires_grad, *current_level; /* the last two: names, interned */
} watch;

/* ---- tracing: launches of this thread are noted and not done ---- */

static __thread PyObject *noted; /* a list, or NULL */
static __thread int noting;      /* the GPU of these launches */

static int note_launch(PyObject *entry, void *stream, PyObject *const *arguments, Py_ssize_t n) {
    PyObject *given = PyTuple_New(n);
    for (Py_ssize_t i = 0; given && i < n; i++) {
        Py_INCREF(arguments[i]);
        PyTuple_SetItem(given, i, arguments[i]);
    }
    long long number = (long long)(intptr_t)stream;
    PyObject *step = given ? Py_BuildValue("OLN", entry, number, given) : NULL;
    int failed = !step || PyList_Append(noted, step);
    Py_XDECREF(step);
    return failed;
}

/* note(list or None, GPU): launches of this thread, which are those of placeholders on a GPU, are
   not done, but appended to a list, as (entry, stream, arguments) */
static PyObject *note_launches(PyObject *self, PyObject *args) {
    PyObject *list, *old = noted;
    if (!PyArg_ParseTuple(args, "Oi", &list, &noting)) return NULL;
    noted = list == Py_None ? NULL : list;
    Py_XINCREF(noted);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

/* ---- looking at a call ---- */

static int push(Sight *s, int64_t word) {
    if (s->words == KEY) return 0;
    s->word[s->words++] = word;
    return 1;
}

static int push_bytes(Sight *s, const void *from, int64_t size) {
    int64_t words = (size + 7) / 8;
    if (s->words + words > KEY) return 0;
    if (words) s->word[s->words + words - 1] = 0;
    memcpy(s->word + s->words, from, (size_t)size);
    s->words += (int)words;
    return 1;
}

static int push_numbers(Sight *s, const DLTensor *t) { /* of a tensor of the host */
    int64_t n = 1;
    for (int d = t->ndim - 1; d >= 0; n *= t->shape[d--])
        if (t->shape[d] != 1 && t->strides[d] != n) return 0;
    int64_t size = n * t->dtype.bits / 8;
    return size <= HOST_BYTES && push_bytes(s, t->data, size);
}

/* Notes which of the last tensor's sizes and strides follow from T. */
static void see_tokens(const DLTensor *t, Sight *s) {
    if (t->ndim < 2) return;
    if (s->tokens == NOT_ASKED) s->tokens = t->shape[1];
    if (t->shape[1] != s->tokens) return;
    s->open[s->num_open++] = s->words - 2 * t->ndim + 1;
    uint64_t rows = (uint64_t)s->tokens * (uint64_t)t->strides[1]; /* may wrap */
    if ((uint64_t)t->strides[0] == rows) s->open[s->num_open++] = s->words - t->ndim;
}

static int see_tensor(PyObject *x, Sight *s, int has_tokens) {
    if (s->tensors == INPUTS) return 0;
    DLTensor *t = &s->tensor[s->tensors];
    s->object[s->tensors] = x;
    if (torch.api->from_python(x, t)) { PyErr_Clear(); return 0; }
    t->data = (char *)t->data + t->byte_offset;
    if (s->gradients == 0) {
        PyObject *wants = PyObject_GetAttr(x, watch.requires_grad);
        s->gradients = wants == Py_True;
        Py_XDECREF(wants);
    }
    int same = 0; /* a tensor given twice is one to launch code */
    while (s->tensor[same].data != t->data) same++;
    int64_t about = KEY_TENSOR | t->ndim << 4 | t->dtype.code << 8 | t->dtype.bits << 16
                  | same << 24 | (int64_t)((uintptr_t)t->data % ALIGNMENT) << 32
                  | (int64_t)t->device.type << 40 | (int64_t)t->device.id << 48;
    if (t->ndim > DIMENSIONS || !push(s, about) || !push_bytes(s, t->shape, 8 * t->ndim)
        || !push_bytes(s, t->strides, 8 * t->ndim)) return 0;
    if (has_tokens) see_tokens(t, s);
    int on_gpu = t->device.type == torch.device_type; /* in tests also tensors of the host */
    if (on_gpu && s->first < 0) s->first = s->tensors;
    s->tensors++;
    int is_read = t->device.type == CPU && (!on_gpu || t->dtype.code < FLOAT_CODE);
    return !is_read || push_numbers(s, t);
}

static int see(PyObject *x, Sight *s, int depth, int has_tokens) { /* 0: it cannot be compared */
    PyTypeObject *type = Py_TYPE(x);
    if ((PyObject *)type == torch.tensor_type || (PyObject *)type == watch.parameter_type)
        return see_tensor(x, s, has_tokens);
    if (x == Py_None) return push(s, KEY_NONE);
    if (x == Py_False || x == Py_True) return push(s, x == Py_True ? KEY_TRUE : KEY_FALSE);
    if (type == &PyLong_Type) {
        int64_t value = PyLong_AsLongLong(x);
        if (value == -1 && PyErr_Occurred()) { PyErr_Clear(); return 0; }
        return push(s, KEY_INT) && push(s, value);
    }
    if (type == &PyFloat_Type) {
        double value = PyFloat_AsDouble(x);
        return push(s, KEY_FLOAT) && push_bytes(s, &value, sizeof value);
    }
    if (type == &PyUnicode_Type) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(x, &size);
        if (!text) PyErr_Clear();
        return text && size <= TEXT && push(s, KEY_TEXT | (int64_t)size << 8)
               && push_bytes(s, text, size);
    }
    int is_list = type == &PyList_Type;
    if ((!is_list && type != &PyTuple_Type) || depth == NESTED) return 0;
    Py_ssize_t n = is_list ? PyList_Size(x) : PyTuple_Size(x);
    if (!push(s, KEY_LIST | (int64_t)n << 8)) return 0;
    for (Py_ssize_t i = 0; i < n; i++)
        if (!see(is_list ? PyList_GetItem(x, i) : PyTuple_GetItem(x, i), s, depth + 1, 0)) return 0;
    return 1;
}

static int asked_for(const char *variable) {
    const char *value = getenv(variable);
    return value && *value && strcmp(value, "0");
}

static int is_number(PyObject *object, long wanted) { /* steals */
    long value = object ? PyLong_AsLong(object) : wanted - 1;
    Py_XDECREF(object);
    return value == wanted;
}

static int is_none(PyObject *object) { /* steals */
    Py_XDECREF(object);
    return object == Py_None;
}

/* Whether something observes the call, or tangents may be on its way: a replay would hide it. */
static int is_watched(void) {
    return noted || asked_for("QLA_CHECK") || !is_number(PyObject_CallNoArgs(watch.modes), 0)
           || !is_none(PyObject_CallNoArgs(watch.functorch))
           || !is_none(PyObject_CallNoArgs(watch.tracing))
           || !is_number(PyObject_GetAttr(watch.forward_ad, watch.current_level), -1);
}

static int look(const Table *t, PyObject *const *arguments, Py_ssize_t n, Sight *s) {
    s->words = s->tensors = s->num_open = 0, s->first = s->gradients = NOT_ASKED;
    s->tokens = NOT_ASKED;
    if (is_watched()) return 0;
    if (t->gradients) {
        PyObject *enabled = PyObject_CallNoArgs(watch.grad_enabled);
        if (enabled == Py_True) s->gradients = 0;
        Py_XDECREF(enabled);
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (!see(arguments[i], s, 0, i < 64 && t->tokens >> i & 1)) return 0;
    for (int i = 0; i < s->num_open; i++) s->instead[i] = OPEN; /* no size, and no stride */
    if (s->first < 0 || stream_of(s->tensor[s->first].device.id, &s->stream)) return 0;
    return push(s, s->gradients == 1) && push(s, (int64_t)(intptr_t)s->stream);
}

static uint64_t hash_of(const Sight *s) {
    uint64_t h = 0x9e3779b97f4a7c15u;
    for (int i = 0; i < s->words; i++) {
        h = (h ^ (uint64_t)s->word[i]) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    return h | 1; /* not 0, which is an empty place of Table.seen */
}

/* ---- tables ---- */

static int looks_like(const Program *p, const Sight *s) {
    return p->words == s->words && !memcmp(p->key, s->word, sizeof(int64_t) * (size_t)s->words);
}

static Program *alike(Program *p, const Sight *s, uint64_t hash) {
    while (p && (p->hash != hash || !looks_like(p, s))) p = p->next;
    return p;
}

static Program *program_of(const Table *t, const Sight *s, uint64_t hash) {
    return alike(t->bucket[hash / 2 % BUCKETS], s, hash);
}

static void drop_program(Program *p) {
    Py_XDECREF(p->value), Py_XDECREF(p->held), Py_XDECREF(p->events);
    Py_XDECREF(p->code), Py_XDECREF(p->tables);
    PyMem_Free(p->step);
    PyMem_Free(p->key);
    PyMem_Free(p);
}

static void drop_oldest(Table *t) {
    Program **oldest = NULL;
    for (int b = 0; b < BUCKETS; b++)
        for (Program **at = &t->bucket[b]; *at; at = &(*at)->next)
            if (!(*at)->running && (!oldest || (*at)->used < (*oldest)->used)) oldest = at;
    if (!oldest) return;
    Program *p = *oldest;
    *oldest = p->next;
    t->num--;
    drop_program(p);
}

static void insert(Table *t, Program *p) {
    if (t->num >= t->most) drop_oldest(t);
    Program **bucket = &t->bucket[p->hash / 2 % BUCKETS];
    p->used = ++t->clock, p->next = *bucket, *bucket = p;
    t->num++;
}

static Program *new_program(const Sight *s, uint64_t hash) {
    Program *p = PyMem_Calloc(1, sizeof *p);
    size_t size = sizeof(int64_t) * (size_t)s->words;
    if (!p || !(p->key = PyMem_Malloc(size))) {
        PyMem_Free(p);
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(p->key, s->word, size);
    p->hash = hash, p->words = s->words;
    return p;
}

static void drop_table(PyObject *capsule) {
    Table *t = PyCapsule_GetPointer(capsule, "table");
    for (int b = 0; b < BUCKETS; b++)
        for (Program *p = t->bucket[b], *next; p; p = next) next = p->next, drop_program(p);
    PyMem_Free(t);
}

#include "forms.c"

/* ---- replay ---- */

static void note_error(void *context, const char *kind, const char *message) {
    PyErr_Format(PyExc_RuntimeError, "qla_kernels: torch cannot allocate: %s: %s", kind, message);
}

static DLManaged *allocate(DLDevice device, DLDataType dtype, int ndim, const int64_t *shape) {
    int64_t strides[DIMENSIONS], n = 1;
    for (int d = ndim - 1; d >= 0; n *= shape[d--]) strides[d] = n;
    DLTensor like = {NULL, device, ndim, dtype, (int64_t *)shape, strides, 0};
    DLManaged *made = NULL;
    if (!torch.api->allocate(&like, &made, NULL, note_error)) return made;
    if (!PyErr_Occurred()) PyErr_NoMemory();
    return NULL;
}

static PyObject *allocate_output(DLDevice device, const Output *o, void **address) {
    DLManaged *made = allocate(device, o->dtype, o->ndim, o->shape);
    void *tensor = NULL;
    if (!made) return NULL;
    *address = (char *)made->tensor.data + made->tensor.byte_offset;
    return torch.api->to_python(made, &tensor) ? NULL : tensor;
}

static int run_step(const Step *x, void *const *base, void *const *stream, int device, Outcome *o) {
    void *address[TENSORS], *on = stream[x->stream];
    int num = x->kind == LAUNCH ? x->entry->tensors : x->kind == COPY ? 2 : x->kind == FILL;
    for (int i = 0; i < num; i++) address[i] = (char *)base[x->base[i]] + x->offset[i];
    if (x->kind == WAIT)
        return TRY(o, cuEventRecord, x->event, stream[x->other])
               || TRY(o, cuStreamWaitEvent, on, x->event, 0);
    if (x->kind == FILL && x->value)
        return TRY(o, cuMemsetD32Async, address[0], (unsigned)x->value, (size_t)x->bytes / 4, on);
    if (x->kind == FILL)
        return TRY(o, cuMemsetD8Async, address[0], 0, (size_t)x->bytes, on);
    if (x->kind == COPY) {
        Copy copy = {.from_type = DEVICE_MEMORY, .to_type = DEVICE_MEMORY, .to = address[0],
                     .from = address[1], .to_pitch = (size_t)x->to_pitch,
                     .from_pitch = (size_t)x->from_pitch, .width = (size_t)x->width,
                     .height = (size_t)x->height};
        return TRY(o, cuMemcpy2DAsync_v2, &copy, on);
    }
    return ready(x->entry, device, x->launch.config.numbers[6], o)
           || enqueue(x->entry, &x->launch, address, on, o);
}

static int run_steps(Program *p, void *const *base, void *first_stream, int device) {
    void *const stream[] = {first_stream, p->other_stream};
    Outcome o = {0};
    int i = 0, failed;
    p->running++;
    PyThreadState *thread = PyEval_SaveThread();
    int entered = enter(device, &o);
    for (failed = entered < 0; !failed && i < p->steps; i += !failed)
        failed = run_step(&p->step[i], base, stream, device, &o);
    if (entered > 0) { void *left; driver.cuCtxPopCurrent_v2(&left); }
    PyEval_RestoreThread(thread);
    p->running--;
    if (!failed) return 0;
    if (p->step[i].kind == LAUNCH) return explain(p->step[i].entry, &o);
    PyErr_Format(PyExc_RuntimeError, "qla_kernels: %s gave error %d", o.step, o.error);
    return -1;
}

static PyObject *results_of(const Program *p, PyObject *const *made) {
    PyObject *results = PyTuple_New(p->results);
    for (int i = 0; results && i < p->results; i++) {
        PyObject *x = p->result[i] < 0 ? Py_None : made[p->result[i]];
        Py_INCREF(x);
        PyTuple_SetItem(results, i, x);
    }
    return results;
}

/* Counts the call as a write to the tensors that it overwrote, as torch does. */
static int note_writes(const Program *p, const Sight *s) {
    if (!p->written) return 0;
    PyObject *written = PyList_New(0), *done = NULL;
    int failed = !written;
    for (int i = 0; !failed && i < p->inputs; i++)
        if (p->written >> i & 1) failed = PyList_Append(written, s->object[i]) < 0;
    if (!failed) done = PyObject_CallFunctionObjArgs(watch.increment_version, written, NULL);
    Py_XDECREF(written);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *replay(Program *p, const Sight *s) {
    DLDevice device = s->tensor[s->first].device;
    PyObject *made[RESULTS] = {0}, *results = NULL;
    DLManaged *workspace = NULL;
    void *base[BASES];
    int i, n = 0, failed = 0;
    for (; n < p->inputs; n++) base[n] = s->tensor[n].data;
    for (i = 0; !failed && i < p->outputs; i++)
        failed = !(made[i] = allocate_output(device, &p->output[i], &base[n + i]));
    n += p->outputs;
    if (!failed && p->workspace)
        failed = !(workspace = allocate(device, (DLDataType){1, 8, 1}, 1, &p->workspace));
    if (!failed) {
        base[n++] = workspace ? workspace->tensor.data : NULL;
        for (i = 0; i < p->constants; i++) base[n + i] = p->constant[i];
        failed = run_steps(p, base, s->stream, device.id);
    }
    /* torch's allocator gives its memory to this stream alone, whose later work comes after ours */
    if (workspace) workspace->deleter(workspace);
    if (!failed && !note_writes(p, s)) results = results_of(p, made);
    for (i = 0; i < p->outputs; i++) Py_XDECREF(made[i]);
    return results;
}

/* A CUDA graph would read constants for longer than the table keeps them. */
static int is_captured(const Program *p, void *stream) {
    int status = 0;
    return p->constants && stream && !driver.cuStreamIsCapturing(stream, &status) && status;
}

/* Whether a hash was seen before; it is the last one of its place from now on. */
static int was_seen(Table *t, uint64_t hash) {
    uint64_t *seen = &t->seen[hash / 2 % SEEN], last = *seen;
    *seen = hash;
    return last == hash;
}

/* Replays a call by a form whose numbers are in x. */
static PyObject *replay_form(Table *t, Program *form, const Sight *s, uint64_t hash, Numbers *x) {
    Program *p = fill(form, s, hash, x);
    if (!p) return Py_BuildValue("");
    t->replays++;
    PyObject *results = replay(p, s);
    if (was_seen(t, hash)) insert(t, p);
    else drop_program(p);
    return results;
}

static PyObject *find(PyObject *self, PyObject *const *arguments, Py_ssize_t n) {
    Table *t = PyCapsule_GetPointer(self, "table");
    Sight s;
    Numbers numbers;
    if (!t || !look(t, arguments, n, &s)) return PyErr_Occurred() ? NULL : Py_BuildValue("");
    uint64_t hash = hash_of(&s);
    int forms = FORMS;
    Program *p = program_of(t, &s, hash);
    if (!p && s.num_open) forms = 0, p = form_of(t, &s, &forms, &numbers);
    if (!p) return was_seen(t, forms < FORMS ? hash_of_kind(&s) : hash) ? PyBool_FromLong(1)
                                                                       : Py_BuildValue("");
    p->used = ++t->clock;
    if (p->value) { Py_INCREF(p->value); return p->value; }
    if (asked_for("QLA_CHECK_PROGRAMS")) return PyBool_FromLong(1);
    if (forked || is_captured(p, s.stream)) return Py_BuildValue("");
    if (p->code) return replay_form(t, p, &s, hash, &numbers);
    t->replays++;
    return replay(p, &s);
}

#include "making.c"

/* table(most, gradients, tokens) -> a function, `find` of a new table. With `gradients`, calls that
   want gradients differ from calls that do not. Bits of tokens: arguments [B, T, ..]. */
static PyObject *make_table(PyObject *self, PyObject *args) {
    int most, gradients;
    unsigned long long tokens;
    if (!PyArg_ParseTuple(args, "ipK", &most, &gradients, &tokens)) return NULL;
    Table *t = PyMem_Calloc(1, sizeof *t);
    if (!t) return PyErr_NoMemory();
    PyCFunction function = (PyCFunction)(void (*)(void))find;
    t->method = (PyMethodDef){"find", function, METH_FASTCALL, "Replays a call that is known."};
    t->most = most, t->gradients = gradients, t->tokens = tokens;
    PyObject *capsule = PyCapsule_New(t, "table", drop_table);
    PyObject *made = capsule ? PyCFunction_NewEx(&t->method, capsule, NULL) : NULL;
    Py_XDECREF(capsule);
    return made;
}

/* num_programs(table): how many programs and values it holds */
static PyObject *num_programs(PyObject *self, PyObject *table) {
    Table *t = PyCapsule_GetPointer(table, "table");
    return t ? PyLong_FromLong(t->num) : NULL;
}

static PyObject *num_replays(PyObject *self, PyObject *table) {
    Table *t = PyCapsule_GetPointer(table, "table");
    return t ? PyLong_FromLongLong(t->replays) : NULL;
}

/* watch_with(Parameter, is_grad_enabled, modes, functorch, tracing, forward_ad, increment_version):
   how to ask torch whether a call is observed, see operators.py, and how to tell it of a write */
static PyObject *watch_with(PyObject *self, PyObject *args) {
    if (!PyArg_ParseTuple(args, "OOOOOOO", &watch.parameter_type, &watch.grad_enabled,
                          &watch.modes, &watch.functorch, &watch.tracing, &watch.forward_ad,
                          &watch.increment_version))
        return NULL;
    Py_INCREF(args); /* for the life of the process */
    watch.requires_grad = PyUnicode_InternFromString("requires_grad");
    watch.current_level = PyUnicode_InternFromString("_current_level");
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
