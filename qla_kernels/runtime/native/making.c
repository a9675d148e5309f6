/* Making programs: what recorder.py or trace.py found out about a call goes into its table.
   Included by programs.c. */

static int read_output(Output *o, PyObject *x) {
    DLTensor t;
    if (torch.api->from_python(x, &t)) return -1;
    o->ndim = t.ndim, o->dtype = t.dtype;
    memcpy(o->shape, t.shape, sizeof(int64_t) * (size_t)t.ndim);
    return 0;
}

static int read_places(Step *x, PyObject *base, PyObject *offset, int num, int bases) {
    if (num < 0 || num > TENSORS || PyTuple_Size(offset) != num) {
        PyErr_Format(PyExc_ValueError, "qla_kernels: a step with %d bases; need at most %d, and an"
                     " offset of each", num, TENSORS);
        return -1;
    }
    for (int i = 0; i < num; i++) {
        x->base[i] = (int)PyLong_AsLong(PyTuple_GetItem(base, i));
        x->offset[i] = PyLong_AsLongLong(PyTuple_GetItem(offset, i));
        if (PyErr_Occurred() || x->base[i] < 0 || x->base[i] >= bases) return -1;
    }
    return 0;
}

static int read_launch(Step *x, PyObject *entry, PyObject *given) {
    PyObject *flat[TENSORS + SCALARS];
    Given g;
    if (!(x->entry = PyCapsule_GetPointer(entry, "entry"))) return -1;
    if (given == Py_None) return 0; /* of a form: `fill` binds it */
    Py_ssize_t n = PyTuple_Size(given);
    for (Py_ssize_t i = 0; i < n && i < TENSORS + SCALARS; i++) flat[i] = PyTuple_GetItem(given, i);
    return take(x->entry, flat, n, &g) || bind(x->entry, flat, &g, &x->launch);
}

static void drop_event(PyObject *event) {
    driver.cuEventDestroy_v2(PyCapsule_GetPointer(event, "event"));
}

/* An event is made in the context of the streams that use it, whichever is current. */
static int make_event(Step *x, PyObject *events, int device) {
    Outcome o = {0};
    int entered = enter(device, &o);
    int failed = entered < 0 || TRY(&o, cuEventCreate, &x->event, EVENT_WITHOUT_TIME);
    if (entered > 0) { void *left; driver.cuCtxPopCurrent_v2(&left); }
    if (failed) {
        PyErr_Format(PyExc_RuntimeError, "qla_kernels: %s gave error %d", o.step, o.error);
        return -1;
    }
    PyObject *event = PyCapsule_New(x->event, "event", drop_event);
    failed = !event || PyList_Append(events, event);
    Py_XDECREF(event);
    return failed ? -1 : 0;
}

/* (kind, stream, bases, offsets, what): what is (entry, arguments), the other stream,
   (value, bytes) or (width, height, pitch of the destination, of the source) */
static int read_step(Step *x, PyObject *step, int bases, PyObject *events, int device) {
    PyObject *base, *offset, *what, *entry, *given;
    if (!PyArg_ParseTuple(step, "iiOOO", &x->kind, &x->stream, &base, &offset, &what)
        || read_places(x, base, offset, (int)PyTuple_Size(base), bases)) return -1;
    switch (x->kind) {
        case LAUNCH:
            return !PyArg_ParseTuple(what, "OO", &entry, &given) || read_launch(x, entry, given);
        case WAIT: return !PyArg_ParseTuple(what, "i", &x->other) || make_event(x, events, device);
        case FILL: return !PyArg_ParseTuple(what, "LL", &x->value, &x->bytes);
        default: return !PyArg_ParseTuple(what, "LLLL", &x->width, &x->height, &x->to_pitch,
                                          &x->from_pitch);
    }
}

static int read_program(Program *p, PyObject *outputs, PyObject *results, PyObject *constants,
                        PyObject *steps, int device) {
    p->outputs = (int)PyTuple_Size(outputs), p->results = (int)PyTuple_Size(results);
    p->constants = (int)PyTuple_Size(constants);
    int num_steps = (int)PyTuple_Size(steps);
    if (PyErr_Occurred()) return -1;
    if (p->outputs > RESULTS || p->results > RESULTS || p->constants > CONSTANTS) {
        PyErr_SetString(PyExc_ValueError, "qla_kernels: a program with too many results");
        return -1;
    }
    for (int i = 0; i < p->outputs; i++)
        if (read_output(&p->output[i], PyTuple_GetItem(outputs, i))) return -1;
    for (int i = 0; i < p->results; i++)
        p->result[i] = (int)PyLong_AsLong(PyTuple_GetItem(results, i));
    for (int i = 0; i < p->constants; i++) {
        DLTensor t;
        if (torch.api->from_python(PyTuple_GetItem(constants, i), &t)) return -1;
        p->constant[i] = (char *)t.data + t.byte_offset;
    }
    if (!(p->step = PyMem_Calloc((size_t)num_steps + 1, sizeof *p->step))
        || !(p->events = PyList_New(0))) return -1;
    for (; p->steps < num_steps; p->steps++) {
        PyObject *step = PyTuple_GetItem(steps, p->steps);
        int bases = p->inputs + p->outputs + 1 + p->constants;
        if (read_step(&p->step[p->steps], step, bases, p->events, device)) return -1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int same_step(const Step *x, const Step *y) {
    return x->kind == y->kind && x->entry == y->entry && x->stream == y->stream
           && x->other == y->other && x->value == y->value && x->bytes == y->bytes
           && x->width == y->width && x->height == y->height && x->to_pitch == y->to_pitch
           && x->from_pitch == y->from_pitch && !memcmp(&x->launch, &y->launch, sizeof x->launch)
           && !memcmp(x->base, y->base, sizeof x->base)
           && !memcmp(x->offset, y->offset, sizeof x->offset);
}

static int same_program(const Program *p, const Program *q) { /* but for addresses of constants */
    if (p->inputs != q->inputs || p->outputs != q->outputs || p->results != q->results
        || p->workspace != q->workspace || p->steps != q->steps
        || memcmp(p->output, q->output, sizeof p->output)
        || memcmp(p->result, q->result, sizeof p->result)) return 0;
    for (int i = 0; i < p->steps; i++)
        if (!same_step(&p->step[i], &q->step[i])) return 0;
    return 1;
}

static int look_at(Table *t, PyObject *arguments, Sight *s) {
    PyObject *flat[KEY];
    Py_ssize_t n = PyTuple_Size(arguments);
    for (Py_ssize_t i = 0; i < n && i < KEY; i++) flat[i] = PyTuple_GetItem(arguments, i);
    return t && n <= KEY && look(t, flat, n, s);
}

/* Puts a program into the table; with code, as a form under the key of such calls. */
static void put(Table *t, Program *p, Sight *s, PyObject *code, PyObject *tables) {
    if (code != Py_None) {
        turn(s);
        p->hash = hash_of(s);
        memcpy(p->key, s->word, sizeof(int64_t) * (size_t)s->words);
        turn(s);
        if (PyBytes_Size(code)) Py_INCREF(p->code = code), Py_INCREF(p->tables = tables);
    }
    insert(t, p);
}

/* store(table, arguments, outputs, results, workspace, constants, other stream, steps, held)

   outputs: tensors like those to allocate; results: the place of each among outputs, or -1. Bases
   of addresses count the arguments' tensors, outputs, workspace, constants. Where there is such a
   program already, or a form of it, compares. Returns an Outcome below. */
enum { STORED, DIFFERS }; /* from the program that is known */

static PyObject *store(PyObject *self, PyObject *args) {
    PyObject *table, *arguments, *outputs, *results, *constants, *steps, *held;
    long long workspace, other;
    if (!PyArg_ParseTuple(args, "OO!OOLOLOO", &table, &PyTuple_Type, &arguments, &outputs,
                          &results, &workspace, &constants, &other, &steps, &held)) return NULL;
    Table *t = PyCapsule_GetPointer(table, "table");
    Sight s;
    Numbers x;
    if (!look_at(t, arguments, &s)) return PyErr_Occurred() ? NULL : PyLong_FromLong(STORED);
    uint64_t hash = hash_of(&s);
    Program *p = new_program(&s, hash);
    if (!p) return NULL;
    p->inputs = s.tensors, p->workspace = workspace, p->other_stream = (void *)(intptr_t)other;
    if (read_program(p, outputs, results, constants, steps, s.tensor[s.first].device.id)) {
        drop_program(p);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    Py_INCREF(held);
    p->held = held;
    int forms = 0, outcome = STORED;
    Program *known = program_of(t, &s, hash), *form = known ? NULL : form_of(t, &s, &forms, &x);
    if (form) known = fill(form, &s, hash, &x);
    if (form || known) {
        outcome = known && !known->value && same_program(known, p) ? STORED : DIFFERS;
        if (form && known) drop_program(known);
        drop_program(p);
    } else insert(t, p);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(outcome);
}

/* open_form(table, arguments, outputs, results, constants, other stream, steps, held, code, tables)

   Stores a program with T open. Its steps have neither offsets nor arguments, and its outputs no
   sizes: code computes them. Returns whether it makes the program of these arguments. */
static PyObject *open_form(PyObject *self, PyObject *args) {
    PyObject *table, *arguments, *outputs, *results, *constants, *steps, *held, *code, *tables;
    long long other;
    if (!PyArg_ParseTuple(args, "OO!OOOLOOSO", &table, &PyTuple_Type, &arguments, &outputs,
                          &results, &constants, &other, &steps, &held, &code, &tables)) return NULL;
    Table *t = PyCapsule_GetPointer(table, "table");
    Sight s;
    Numbers x;
    if (!look_at(t, arguments, &s)) return PyErr_Occurred() ? NULL : PyBool_FromLong(1);
    uint64_t hash = hash_of(&s);
    Program *p = new_program(&s, hash), *made = NULL;
    if (!p) return NULL;
    p->inputs = s.tensors, p->other_stream = (void *)(intptr_t)other;
    if (read_program(p, outputs, results, constants, steps, s.tensor[s.first].device.id)) {
        drop_program(p);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    Py_INCREF(held), Py_INCREF(code), Py_INCREF(tables);
    p->held = held, p->code = code, p->tables = tables;
    if (numbers_of(p, s.tokens, &x)) made = fill(p, &s, hash, &x);
    int works = made != NULL;
    p->code = p->tables = NULL; /* `put` takes them */
    if (works) drop_program(made), put(t, p, &s, code, tables);
    else drop_program(p);
    Py_DECREF(code), Py_DECREF(tables);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(works);
}

/* keep(table, arguments, value, code or None, tables): later calls that look like this one find the
   value; with code, also calls with another T. No bytes of code: such calls have no form. */
static PyObject *keep(PyObject *self, PyObject *args) {
    PyObject *table, *arguments, *value, *code, *tables;
    if (!PyArg_ParseTuple(args, "OO!OOO", &table, &PyTuple_Type, &arguments, &value, &code,
                          &tables)) return NULL;
    Table *t = PyCapsule_GetPointer(table, "table");
    Sight s;
    if (look_at(t, arguments, &s)) {
        uint64_t hash = hash_of(&s);
        Program *p = code == Py_None && program_of(t, &s, hash) ? NULL : new_program(&s, hash);
        if (p) {
            Py_INCREF(value);
            p->value = value;
            put(t, p, &s, code, tables);
        }
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* may_open(table, arguments): whether such calls may get another form */
static PyObject *may_open(PyObject *self, PyObject *args) {
    PyObject *table, *arguments;
    if (!PyArg_ParseTuple(args, "OO!", &table, &PyTuple_Type, &arguments)) return NULL;
    Table *t = PyCapsule_GetPointer(table, "table");
    Sight s;
    Numbers x;
    int forms = 0, may = look_at(t, arguments, &s) && s.num_open && !form_of(t, &s, &forms, &x);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(may && forms < FORMS);
}
