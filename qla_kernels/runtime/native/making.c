/* Making programs: what trace.py found out about a call goes into its table.
   Included by programs.c. */

enum { NOT_LAUNCHED, DIFFERS, FAILS }; /* outcomes of `store`: run the call as usual; the program
   differs from the one that is known; a launch refuses its numbers */

static int read_output(Output *o, PyObject *x) {
    DLTensor t;
    if (torch.api->from_python(x, &t)) return -1;
    o->ndim = t.ndim, o->dtype = t.dtype;
    memcpy(o->shape, t.shape, sizeof(int64_t) * (size_t)t.ndim);
    return 0;
}

static int read_bases(Step *x, PyObject *base, int num, int bases) {
    if (num < 0 || num > TENSORS) {
        PyErr_Format(PyExc_ValueError, "qla_kernels: a step with %d bases; need at most %d", num,
                     TENSORS);
        return -1;
    }
    for (int i = 0; i < num; i++) {
        x->base[i] = (int)PyLong_AsLong(PyTuple_GetItem(base, i));
        if (PyErr_Occurred() || x->base[i] < 0 || x->base[i] >= bases) return -1;
    }
    return 0;
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

/* (kind, stream, bases, what): what is an entry, the other stream, or the value to fill with */
static int read_step(Step *x, PyObject *step, int bases, PyObject *events, int device) {
    PyObject *base, *what;
    if (!PyArg_ParseTuple(step, "iiOO", &x->kind, &x->stream, &base, &what)
        || read_bases(x, base, (int)PyTuple_Size(base), bases)) return -1;
    switch (x->kind) {
        case LAUNCH: return !(x->entry = PyCapsule_GetPointer(what, "entry"));
        case WAIT: x->other = (int)PyLong_AsLong(what); return make_event(x, events, device);
        case FILL: x->value = PyLong_AsLongLong(what);
    }
    return PyErr_Occurred() ? -1 : 0;
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

/* Whether calls that look like this one apart from T may get another form. */
static int may_open(const Table *t, Sight *s) {
    Numbers x;
    int forms = 0;
    return s->num_open && !form_of(t, s, &forms, &x) && forms < FORMS;
}

/* Puts a program into the table under the key of calls that look like this one apart from T. */
static void put(Table *t, Program *p, Sight *s) {
    turn(s);
    p->hash = hash_of(s);
    memcpy(p->key, s->word, sizeof(int64_t) * (size_t)s->words);
    turn(s);
    insert(t, p);
}

/* Launches a program that `store` has read, and keeps it, if no such program is known. */
static PyObject *launch_first(Table *t, Program *form, Sight *s) {
    uint64_t hash = hash_of(s);
    int forms = 0;
    Numbers x;
    Program *p = numbers_of(form, s->tokens, &x) ? fill(form, s, hash, &x) : NULL;
    if (!p) { drop_program(form); return PyErr_Occurred() ? NULL : PyLong_FromLong(FAILS); }
    Program *known = program_of(t, s, hash), *of = known ? NULL : form_of(t, s, &forms, &x);
    Program *other = of ? fill(of, s, hash, &x) : known;
    int differs = (of || known) && (!other || other->value || !same_program(other, p));
    int opens = !known && may_open(t, s), is_kept = !known && !of && !opens;
    if (of && other) drop_program(other);
    if (opens) put(t, form, s); else drop_program(form);
    if (is_kept) insert(t, p);
    PyObject *results = differs ? PyLong_FromLong(DIFFERS)
                      : forked ? PyLong_FromLong(NOT_LAUNCHED) : replay(p, s);
    if (!is_kept) drop_program(p);
    return results;
}

/* store(table, arguments, outputs, results, constants, other stream, steps, written, held, code,
         tables)

   Launches a program, and keeps it. outputs: empty tensors of their dtypes and numbers of axes;
   results: the place of each among outputs, or -1; written: bits of inputs. Bases of addresses
   count the arguments' tensors, outputs, workspace, constants. Code computes sizes, offsets and
   numbers of launches from T. Returns the results, or an Outcome. With a program that is known
   already, the new one is compared. */
static PyObject *store(PyObject *self, PyObject *args) {
    PyObject *table, *arguments, *outputs, *results, *constants, *steps, *held, *code, *tables;
    long long other;
    unsigned long long written;
    if (!PyArg_ParseTuple(args, "OO!OOOLOKOSO", &table, &PyTuple_Type, &arguments, &outputs,
                          &results, &constants, &other, &steps, &written, &held, &code, &tables))
        return NULL;
    Table *t = PyCapsule_GetPointer(table, "table");
    Sight s;
    if (!look_at(t, arguments, &s)) return PyErr_Occurred() ? NULL : PyLong_FromLong(NOT_LAUNCHED);
    Program *p = new_program(&s, 0);
    if (!p) return NULL;
    p->inputs = s.tensors, p->other_stream = (void *)(intptr_t)other, p->written = written;
    if (read_program(p, outputs, results, constants, steps, s.tensor[s.first].device.id)) {
        drop_program(p);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    Py_INCREF(p->held = held), Py_INCREF(p->code = code), Py_INCREF(p->tables = tables);
    return launch_first(t, p, &s);
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
        int has_code = code != Py_None && PyBytes_Size(code);
        int opens = code != Py_None && may_open(t, &s);
        int is_kept = opens || ((code == Py_None || has_code) && !program_of(t, &s, hash));
        Program *p = is_kept ? new_program(&s, hash) : NULL;
        if (p) {
            Py_INCREF(p->value = value);
            if (opens && has_code) Py_INCREF(p->code = code), Py_INCREF(p->tables = tables);
            if (opens) put(t, p, &s); else insert(t, p);
        }
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
