/* Forms: programs in which the number of tokens T is open. Included by programs.c.

   A form is found by what a call looks like apart from T, and holds for T where a small program,
   its code, says so: symbols.py writes it while launch code runs on placeholders. The code computes
   every number of the program from T. So a call with a new T gets a program of its own, which is
   replayed like any other, and kept if such a call comes again.

   Code is an array of numbers: how many nodes there are; of each node its operation, two operands,
   and the bounds outside of which the form does not hold; then places of nodes, in the order in
   which `fill` reads them. */

enum { TOKENS_NODE, CONSTANT_NODE, ADD_NODE, SUB_NODE, MUL_NODE, FLOORDIV_NODE, MOD_NODE,
       LOOKUP_NODE }; /* symbols.py has the same */
enum { NODES = 2048, FORMS = 64 }; /* the most of a form, and of calls that look alike */

typedef struct { Reader code; int nodes; int64_t value[NODES]; } Numbers;

/* Exchanges what depends on T in a key with marks, and back. */
static void turn(Sight *s) {
    for (int i = 0; i < s->num_open; i++) {
        int64_t *word = &s->word[s->open[i]], other = s->instead[i];
        s->instead[i] = *word, *word = other;
    }
}

static uint64_t hash_of_kind(Sight *s) { /* of calls that look alike apart from T */
    turn(s);
    uint64_t hash = hash_of(s);
    turn(s);
    return hash;
}

static int look_up(PyObject *tables, int64_t i, int64_t at, int64_t *found) {
    PyObject *table = PyTuple_GetItem(tables, (Py_ssize_t)i); /* borrowed; a Decided */
    PyObject *key = table ? PyLong_FromLongLong(at) : NULL;
    PyObject *value = key ? PyObject_GetItem(table, key) : NULL;
    Py_XDECREF(key);
    *found = integer_of(value);
    int failed = PyErr_Occurred() != NULL;
    PyErr_Clear(); /* launch code says so itself */
    return !failed;
}

static int compute(int64_t code, int64_t a, int64_t b, int64_t *to) { /* as Python does */
    switch (code) {
        case ADD_NODE: return !__builtin_add_overflow(a, b, to);
        case SUB_NODE: return !__builtin_sub_overflow(a, b, to);
        case MUL_NODE: return !__builtin_mul_overflow(a, b, to);
    }
    if (b < 1) return 0;
    int64_t rest = a % b, low = rest < 0;
    *to = code == FLOORDIV_NODE ? a / b - low : rest + low * b;
    return code == FLOORDIV_NODE || code == MOD_NODE;
}

/* Computes the nodes for a T; 0 if the form does not hold for it. May call Python. */
static int numbers_of(const Program *form, int64_t tokens, Numbers *x) {
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(form->code, &bytes, &size)) return 0;
    x->code = (Reader){(const int64_t *)bytes, (const int64_t *)(bytes + size), 0};
    x->nodes = below(&x->code, NODES + 1);
    for (int i = 0; i < x->nodes && !x->code.bad; i++) {
        int64_t code = next(&x->code), a = next(&x->code), b = next(&x->code);
        int64_t least = next(&x->code), most = next(&x->code), *to = &x->value[i];
        if (code == TOKENS_NODE) *to = tokens;
        else if (code == CONSTANT_NODE) *to = a;
        else if (b < 0 || b >= i || a < 0) return 0;
        else if (code == LOOKUP_NODE) {
            if (!look_up(form->tables, a, x->value[b], to)) return 0;
        } else if (a >= i || !compute(code, x->value[a], x->value[b], to)) return 0;
        if (*to < least || *to > most) return 0;
    }
    return !x->code.bad;
}

static int64_t number(Numbers *x) { return x->value[below(&x->code, x->nodes)]; }

static int fill_launch(Step *step, Numbers *x) {
    const Entry *e = step->entry;
    Given g;
    for (int i = 0; i < e->tensors; i++) {
        DLTensor *t = &g.tensor[i];
        t->shape = g.room[i], t->strides = g.room[i] + DIMENSIONS;
        for (int d = 0; d < e->ndim[i]; d++) t->shape[d] = number(x);
        for (int d = 0; d < e->ndim[i]; d++) t->strides[d] = number(x);
    }
    for (int i = 0; i < e->scalars; i++) {
        int64_t n = number(x);
        int32_t bits = (int32_t)number(x);
        if (n != (int32_t)n) return -1;
        g.value[e->symbols + i] = n;
        memcpy(&g.real[i], &bits, sizeof bits);
    }
    return bind_numbers(e, &g, &step->launch);
}

static int fill_step(Step *step, Numbers *x) {
    int num = step->kind == LAUNCH ? step->entry->tensors
            : step->kind == COPY ? 2 : step->kind == FILL;
    for (int i = 0; i < num; i++) step->offset[i] = number(x);
    if (step->kind == FILL) step->bytes = number(x);
    if (step->kind == COPY) {
        step->width = number(x), step->height = number(x);
        step->to_pitch = number(x), step->from_pitch = number(x);
    }
    return step->kind == LAUNCH ? fill_launch(step, x) : 0;
}

/* Returns the program of a call whose numbers are in x; NULL if there is none. */
static Program *fill(Program *form, const Sight *s, uint64_t hash, Numbers *x) {
    Program *p = form->value ? NULL : new_program(s, hash);
    if (!p) { PyErr_Clear(); return NULL; }
    int64_t *key = p->key;
    *p = *form;
    p->hash = hash, p->words = s->words, p->key = key, p->running = 0, p->code = p->tables = NULL;
    Py_XINCREF(p->held), Py_XINCREF(p->events);
    size_t size = sizeof(Step) * (size_t)form->steps;
    int failed = !(p->step = PyMem_Malloc(size + 1));
    form->running++; /* a refusal makes Python objects */
    if (!failed) memcpy(p->step, form->step, size);
    p->workspace = number(x);
    for (int i = 0; i < p->outputs; i++)
        for (int d = 0; d < p->output[i].ndim; d++) p->output[i].shape[d] = number(x);
    for (int i = 0; !failed && i < p->steps; i++) failed = fill_step(&p->step[i], x);
    form->running--;
    if (!failed && !x->code.bad && x->code.at == x->code.end) return p;
    PyErr_Clear(); /* a size that a kernel refuses: launch code says so better */
    drop_program(p);
    return NULL;
}

/* Returns the form that holds for a call, whose numbers are then in x; NULL if there is none.
   `known` counts forms of such calls; FORMS, if there will be no more. */
static Program *form_of(const Table *t, Sight *s, int *known, Numbers *x) {
    turn(s);
    uint64_t hash = hash_of(s);
    Program *form = program_of(t, s, hash);
    while (form) {
        *known += form->code ? 1 : FORMS;
        form->running++; /* Python may run another thread */
        int holds = form->code && numbers_of(form, s->tokens, x);
        form->running--;
        if (holds) break;
        form = alike(form->next, s, hash);
    }
    turn(s);
    return form;
}
