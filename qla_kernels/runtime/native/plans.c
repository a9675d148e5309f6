/* The plan of a batch whose lengths the host knows. Included by launcher.c.

   Training has new lengths in every step. To plan six of them for a forward and a backward takes
   Python 0.5 ms, longer than all launches of the call, and C 3 us. So this file repeats the
   functions of gdn/lengths.py, times.py, plan.py and choices.py that plan known lengths. They keep
   their names here and are explained there. Constants come from there, too. tests/native/plans.py
   compares the answers, which are equal. All of it runs under the GIL, so tables are static.

   `lengths` are pairs (chunks, how many have that many), in ascending order of chunks. */

enum { PIECES = 1024, KERNELS = 3, WIDTHS = 2, MOST_WAVES = 16, DEALT = 512 };

typedef struct { int64_t chunks, count; } Piece;
typedef struct { int n; Piece of[PIECES]; } Lengths;
typedef struct { int64_t heads, K, V, sms; } Shape;
typedef struct { int64_t tile_v; int solves, cuts; double step; } Choice; /* a ForwardChoice */
typedef struct { int kernel; int64_t segment_chunks; double bound; int shares; } Plan; /* 0: whole */

static struct { /* all doubles, in the order of `constants` in gdn/known.py */
    double launch, start, solve_start, solve_step, cut[2], growth, gain, gradient_gain, kept_gain;
    double shares_gain, least_gain, uncut_share, uncut_more, quiet, busy, long_bound;
    double map_start[2], gradient_map_wave, look, look_step, short_launch, around_backward;
    double map_ctas[2], map_step[2][2], map_tile, scan_step, gradient_fold, cold_share, forgotten;
    double pair_step[WIDTHS][2], next_wave, later_waves, chunk_grads_step;
    double shares_time, next_item, few_items, share_step, apart_step, far, handed, most_shared;
    double dealt_gain, keeping_gain, keeping_share, shared_room, room[2], chunk;
    double bound[2], gradient_bound[2]; /* by default, and exact */
    double num_waves, wave[MOST_WAVES];
    double tile[KERNELS], solves[KERNELS], cuts[KERNELS], step[KERNELS]; /* of STEP */
    double width[WIDTHS], chain_step[WIDTHS];                            /* of CHAIN_STEP */
} of;

static double least_of(double a, double b) { return b < a ? b : a; }
static double most_of(double a, double b) { return b > a ? b : a; }
static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; } /* of a >= 0 */

/* The exact remainder of a >= 0 by b > 0. fmod of libm has a version that old systems lack. */
static double remainder_of(double a, double b) {
    while (a >= b) {
        double times = b;
        while (times <= a / 2) times *= 2;
        a -= times;
    }
    return a;
}

static Choice choice_of(int i) {
    return (Choice){(int64_t)of.tile[i], of.solves[i] != 0, of.cuts[i] != 0, of.step[i]};
}

static int64_t rounded(int64_t chunks) {
    int bits = chunks ? 64 - __builtin_clzll((uint64_t)chunks) : 0;
    int64_t unit = (int64_t)1 << (bits > 4 ? bits - 4 : 0);
    return (chunks + unit / 2) / unit * unit;
}

/* ---- times.py ---- */

static int64_t total(const Lengths *x) {
    int64_t sum = 0;
    for (int i = 0; i < x->n; i++) sum += x->of[i].chunks * x->of[i].count;
    return sum;
}

static int64_t count_of(const Lengths *x) {
    int64_t sum = 0;
    for (int i = 0; i < x->n; i++) sum += x->of[i].count;
    return sum;
}

static int64_t longest_of(const Lengths *x) { return x->n ? x->of[x->n - 1].chunks : 0; }

static double solve(const Lengths *x, const Shape *s) {
    return of.solve_start + of.solve_step * (double)s->heads * (double)total(x) / (double)s->sms;
}

static double chain(const Lengths *pieces, double step, int64_t ctas, int64_t sms, double start) {
    double work = 0, shortest = 1, longest = 1;
    int64_t all = 0;
    for (int i = 0; i < pieces->n; i++) {
        double time = start + step * (double)pieces->of[i].chunks;
        int64_t count = ctas * pieces->of[i].count;
        work += time * (double)count, all += count;
        if (!i) shortest = time;
        longest = time;
    }
    double mean = work / (double)(all ? all : 1), alike = shortest / longest;
    double waves = alike * (double)up(all, sms) + (1 - alike) * (double)all / (double)sms;
    return of.launch + most_of(longest, waves * mean);
}

static double apart(const Lengths *x, int64_t tiles, int64_t sms) {
    int64_t longest = longest_of(x);
    if (x->n > 1) return least_of((double)longest / 4, of.far);
    double around = (double)(longest ? longest : 1);
    double between = remainder_of((double)(tiles * total(x)) / (double)sms, around);
    return least_of(least_of(between, (double)longest - between), of.far);
}

static double shares(const Lengths *x, const Shape *s, int64_t room) {
    int64_t tile = (int64_t)of.tile[1], tiles = s->heads * s->V / tile, items = tiles * count_of(x);
    int fits = s->V % tile == 0 && (double)room == of.shared_room;
    if (!fits || items <= s->sms || (double)items > of.most_shared) return __builtin_inf();
    int64_t share = up(tiles * total(x), s->sms), longest = longest_of(x);
    if (share < 1) share = 1;
    double step = of.share_step + of.apart_step * apart(x, tiles, s->sms);
    double start = (double)items <= of.few_items * (double)s->sms ? of.next_item : of.start;
    double waiting = of.handed * (double)(longest ? (longest - 1) / share : -1);
    double around = of.shares_time + of.launch + of.start + start * (double)items / (double)s->sms;
    return around + waiting + step * (double)(share > longest ? share : longest);
}

static double windows(double bound, int64_t length, int64_t *window) { /* returns the share */
    *window = length;
    if (bound == -__builtin_inf()) return 1;
    double exact = -bound / of.forgotten;
    if (exact > (double)length) return 1;
    int64_t chunks = (int64_t)exact + ((double)(int64_t)exact < exact);
    if (chunks >= length) return 1;
    *window = chunks;
    return of.cold_share;
}

static double maps(const Lengths *x, const Lengths *pieces, const Shape *s, double bound,
                   int solves, int reads_keys) {
    int64_t length = longest_of(pieces), mapped = count_of(pieces) - count_of(x), firsts = 0, window;
    for (int i = 0; i < x->n; i++)
        if (x->of[i].chunks > length) firsts += x->of[i].count;
    double share = windows(bound, length, &window), n = (double)length, w = (double)window;
    double for_b = (double)(s->heads * mapped * s->V) / of.map_tile;
    double for_M = (double)(s->heads * (mapped - firsts) * s->K) / of.map_tile;
    double alone = of.map_step[solves][0], among = of.map_step[solves][1];
    double start = of.map_start[solves] + (bound > -__builtin_inf() ? of.look : 0);
    double look = start + of.look_step * w * (double)reads_keys;
    double warm = (1 - share) * (for_b * (look + among * w) + for_M * look);
    double resident = of.map_ctas[solves] * (double)s->sms, cold = share * (for_b + for_M);
    double rest = remainder_of(cold, resident), waves = (double)(int64_t)((cold - rest) / resident + 0.5);
    double at_once = rest + warm / (start + among * n);
    double walk = start + (at_once <= (double)s->sms ? alone : among) * n;
    double last = most_of(rest ? walk : look + among * w, (rest * walk + warm) / resident);
    return waves * (start + among * n) + last;
}

static double folds(const Lengths *x, const Lengths *pieces, double step) {
    double whole = (double)longest_of(x), piece = (double)longest_of(pieces);
    return step * most_of(0, most_of(1, whole) / most_of(1, piece) - 2);
}

static double chains_of_width(const Lengths *pieces, int i, const Shape *s) {
    int64_t ctas = s->heads * s->V / (int64_t)of.width[i];
    int beside = 2 * ctas * count_of(pieces) <= s->sms;
    double step = of.chain_step[i] * (beside ? 1.0 : of.later_waves);
    double work = of.pair_step[i][beside] * (double)ctas * (double)total(pieces) / (double)s->sms;
    double steps = chain(pieces, step, 2 * ctas, s->sms, of.next_wave);
    return of.start + most_of(of.launch + work, steps);
}

static double both_chains(const Lengths *pieces, const Shape *s, int *width) {
    double least = __builtin_inf();
    for (int i = 0; i < WIDTHS; i++) {
        if (s->V % (int64_t)of.width[i]) continue;
        double time = chains_of_width(pieces, i, s);
        if (time < least) least = time, *width = (int)of.width[i];
    }
    return least;
}

static double gradient_pieces(const Lengths *x, const Lengths *pieces, const Shape *s, double bound) {
    int64_t length = longest_of(pieces), mapped = count_of(pieces) - count_of(x), window;
    int width;
    double ctas = (double)(mapped * s->heads * s->V) / of.map_tile;
    double share = windows(bound, length, &window);
    double steps = ctas * (share * (double)length + (1 - share) * (double)window);
    double waves = of.gradient_map_wave * ctas / (double)s->sms;
    double most = most_of((double)length, steps / (double)s->sms);
    double found = of.short_launch + waves + of.chain_step[WIDTHS - 1] * most;
    double before = of.around_backward + found + folds(x, pieces, of.gradient_fold);
    return before + both_chains(pieces, s, &width);
}

static double cut_backward(const Lengths *x, const Lengths *pieces, const Shape *s, double bound) {
    return maps(x, pieces, s, bound, 0, 1) + gradient_pieces(x, pieces, s, bound);
}

/* ---- lengths.py, plan.py ---- */

static int64_t num_segments(const Lengths *x, int64_t most) {
    int64_t sum = 0;
    for (int i = 0; i < x->n; i++)
        sum += (x->of[i].chunks > most ? up(x->of[i].chunks, most) : 1) * x->of[i].count;
    return sum;
}

static int by_chunks(const void *a, const void *b) {
    int64_t x = ((const Piece *)a)->chunks, y = ((const Piece *)b)->chunks;
    return (x > y) - (x < y);
}

static void sort_pieces(Lengths *x) { /* and adds up those of equal length */
    int n = 0;
    qsort(x->of, (size_t)x->n, sizeof *x->of, by_chunks);
    for (int i = 0; i < x->n; i++) {
        if (!x->of[i].count) continue;
        if (n && x->of[n - 1].chunks == x->of[i].chunks) x->of[n - 1].count += x->of[i].count;
        else x->of[n++] = x->of[i];
    }
    x->n = n;
}

static void cut_lengths(const Lengths *x, int64_t most, Lengths *pieces) {
    pieces->n = 0;
    for (int i = 0; i < x->n; i++) {
        int64_t chunks = x->of[i].chunks, count = x->of[i].count;
        int64_t segments = chunks > most ? up(chunks, most) : 1, longer = chunks % segments;
        pieces->of[pieces->n++] = (Piece){chunks / segments + 1, longer * count};
        pieces->of[pieces->n++] = (Piece){chunks / segments, (segments - longer) * count};
    }
    sort_pieces(pieces);
}

static int64_t spacing(const Lengths *x, int64_t most_segments) {
    int64_t low = 0, high = longest_of(x) - 1;
    if (high < 0) high = 0;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (num_segments(x, middle + 1) <= most_segments) high = middle;
        else low = middle + 1;
    }
    return low + 1;
}

static int spacings(const Lengths *x, int64_t ctas, int64_t sms, int64_t *found, int n) {
    for (int i = 0; i < (int)of.num_waves; i++) {
        int64_t most = spacing(x, (int64_t)(of.wave[i] * (double)sms) / ctas);
        int known = most >= longest_of(x), at = n;
        for (int j = 0; j < n; j++) known |= found[j] == most;
        if (known) continue;
        for (n++; at && found[at - 1] > most; at--) found[at] = found[at - 1];
        found[at] = most;
    }
    return n;
}

static double whole_time(double duration) { return of.uncut_share * duration + of.uncut_more; }

static int gains(double shared, double least) {
    return shared < least_of(of.shares_gain * least, least - of.least_gain);
}

static double forward_time(const Plan *p, const Lengths *x, const Shape *s) {
    static Lengths cut;
    Choice kernel = choice_of(p->kernel);
    int64_t ctas = s->heads * s->V / kernel.tile_v;
    double step = kernel.step, before = kernel.solves ? 0 : solve(x, s);
    const Lengths *pieces = x;
    if (p->segment_chunks) {
        int grows = !kernel.solves && -__builtin_inf() < p->bound && p->bound < of.long_bound;
        cut_lengths(x, p->segment_chunks, &cut);
        pieces = &cut;
        before += of.cut[kernel.solves] + folds(x, pieces, of.scan_step);
        before += maps(x, pieces, s, p->bound, kernel.solves, !grows);
        if (grows) before += of.growth * (double)s->heads * (double)total(x) / (double)s->sms;
        if ((double)(ctas * count_of(pieces)) <= of.busy * (double)s->sms) step *= of.quiet;
    }
    return before + chain(pieces, step, ctas, s->sms, of.start);
}

static Plan forward(const Lengths *x, const Shape *s, int64_t room, double bound) {
    Plan whole = {0}, cut = {0};
    double least = __builtin_inf(), least_cut = __builtin_inf();
    for (int i = 0; i < KERNELS; i++) {
        Plan p = {i, 0, -__builtin_inf(), 0};
        if (s->V % choice_of(i).tile_v) continue;
        double time = forward_time(&p, x, s);
        if (time < least) least = time, whole = p;
    }
    for (int i = 0; i < KERNELS; i++) {
        Choice kernel = choice_of(i);
        int64_t most[MOST_WAVES];
        if (s->V % kernel.tile_v || !kernel.cuts) continue;
        int n = spacings(x, s->heads * s->V / kernel.tile_v, s->sms, most, 0);
        for (int j = 0; j < n; j++)
            for (int exact = 0; exact < 1 + (bound > -__builtin_inf()); exact++) {
                Plan p = {i, most[j], exact ? -__builtin_inf() : bound, 0};
                double time = forward_time(&p, x, s);
                if (time < least_cut) least_cut = time, cut = p;
            }
    }
    Plan best = whole;
    least = whole_time(least);
    if (least_cut < of.gain * least) best = cut, least = least_cut;
    if (gains(whole_time(shares(x, s, room)), least)) best = (Plan){1, 0, -__builtin_inf(), 1};
    return best;
}

static int64_t backward(const Lengths *x, const Shape *s, double bound) { /* 0: whole */
    static Lengths pieces;
    int64_t wanted[WIDTHS * MOST_WAVES], best = 0;
    int n = 0, width;
    double least = __builtin_inf();
    for (int i = 0; i < WIDTHS; i++)
        if (s->V % (int64_t)of.width[i] == 0)
            n = spacings(x, s->heads * s->V / (int64_t)of.width[i], s->sms / 2, wanted, n);
    for (int i = 0; i < n; i++) {
        cut_lengths(x, wanted[i], &pieces);
        double time = cut_backward(x, &pieces, s, bound);
        if (time < least) least = time, best = wanted[i];
    }
    return n && least <= of.gradient_gain * both_chains(x, s, &width) ? best : 0;
}

static int width_of(const Lengths *x, int64_t most, const Shape *s) {
    static Lengths pieces;
    int width = 0;
    if (most) cut_lengths(x, most, &pieces);
    both_chains(most ? &pieces : x, s, &width);
    return width;
}

static int kept_is_faster(const Lengths *x, const Shape *s, int64_t most, double bound) {
    static Lengths pieces;
    int width;
    cut_lengths(x, most, &pieces);
    return gradient_pieces(x, &pieces, s, bound) <= of.kept_gain * both_chains(x, s, &width);
}

/* ---- order, and keeping segments ---- */

static double dealt(const int64_t *chunks, int64_t n, double step, int64_t ctas, int64_t sms) {
    struct { double when; int64_t idle; } free[DEALT] = {{0, sms}}, next;
    int first = 0, end = 1;
    for (int64_t i = 0; i < n; i++)
        for (int64_t wanted = ctas; wanted;) {
            int64_t took = free[first].idle < wanted ? free[first].idle : wanted;
            next.when = free[first].when + of.start + step * (double)chunks[i], next.idle = took;
            if (!(free[first].idle -= took)) first++;
            wanted -= took;
            if (end == DEALT) { /* moves what is left to the front */
                memmove(free, free + first, sizeof *free * (size_t)(end - first));
                end -= first, first = 0;
            }
            if (end == DEALT) return __builtin_inf();
            int at = end++;
            for (; at > first && free[at - 1].when > next.when; at--) free[at] = free[at - 1];
            free[at] = next;
        }
    return of.launch + free[end - 1].when;
}

static Plan in_order(Plan p, const Lengths *x, const int64_t *chunks, int64_t n, const Shape *s,
                     int64_t room) {
    Choice kernel = choice_of(p.kernel);
    int64_t ctas = s->heads * s->V / kernel.tile_v, items = ctas * n;
    int few = s->sms < items && (double)items <= of.few_items * (double)s->sms;
    if (p.segment_chunks || p.shares || !few) return p;
    double before = kernel.solves ? 0 : solve(x, s);
    double time = before + dealt(chunks, n, kernel.step, ctas, s->sms);
    double shared = whole_time(shares(x, s, room));
    return shared < of.dealt_gain * whole_time(time) ? (Plan){1, 0, -__builtin_inf(), 1} : p;
}

static int keeps(const Lengths *x, const Shape *s, int64_t room, int64_t keys, int64_t most,
                 double gradient_bound) {
    static Lengths pieces;
    int64_t chunk = (int64_t)of.chunk, tokens = chunk * total(x);
    int64_t slots = count_of(x) + tokens / (most * chunk);
    int64_t each = 2 * (2 * keys * s->K + s->heads * (s->V + 1 + chunk)) + 4 * s->heads;
    int64_t kept = 4 * room * (room + s->V) * s->heads * slots;
    if ((double)kept > of.keeping_share * (double)(tokens * each)) return 0;
    cut_lengths(x, most, &pieces);
    double with = gradient_pieces(x, &pieces, s, gradient_bound), alone;
    int64_t own = backward(x, s, gradient_bound);
    int width;
    if (own) {
        cut_lengths(x, own, &pieces);
        alone = cut_backward(x, &pieces, s, gradient_bound);
    } else alone = both_chains(x, s, &width);
    double rest = of.launch
                + of.chunk_grads_step * (double)total(x) * (double)s->heads / (double)s->sms;
    return with + rest < of.keeping_gain * (alone + rest);
}

/* ---- what Python calls ---- */

/* plan_with(numbers): the constants of the model, in the order of the struct above */
static PyObject *plan_with(PyObject *self, PyObject *numbers) {
    double *to = (double *)&of;
    Py_ssize_t n = sizeof of / sizeof *to, given = PyTuple_Size(numbers);
    if (given != n) {
        PyErr_Format(PyExc_ValueError, "qla_kernels: %zd constants of plans; need %zd", given, n);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) to[i] = PyFloat_AsDouble(PyTuple_GetItem(numbers, i));
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static int64_t bound_at(const DLTensor *t, int64_t i) {
    const char *data = (const char *)t->data + t->byte_offset;
    return t->dtype.bits == 32 ? ((const int32_t *)data)[i] : ((const int64_t *)data)[i];
}

/* Reads bounds as chunks of sequences in order, and counted; 0 if they are no bounds of T tokens. */
static int read_bounds(const DLTensor *t, int64_t tokens, int64_t *chunks, Lengths *x) {
    int64_t n = t->shape[0] - 1, before = bound_at(t, 0), step = (int64_t)of.chunk;
    x->n = 0;
    if (before) return 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t end = bound_at(t, i + 1), length = rounded(up(end - before, step));
        if (end < before || end > tokens) return 0;
        before = end, chunks[i] = length;
        x->of[x->n++] = (Piece){length, 1};
        if (x->n == PIECES) sort_pieces(x);
        if (x->n == PIECES) return 0;
    }
    sort_pieces(x);
    return 2 * x->n <= PIECES; /* as many as they have when they are cut */
}

enum { SEQUENCES = 4096, DIMENSION_K = 3 };

static int is_plain(PyObject *x) { /* no subclass, whose data need not be those of the call */
    PyObject *type = (PyObject *)Py_TYPE(x);
    return type == torch.tensor_type || type == watch.parameter_type;
}

static int64_t room_of(int64_t K) { /* the K of the kernels; 0: others, which are not planned here */
    return K % 16 ? 0 : (double)K <= of.room[0] ? (int64_t)of.room[0]
                      : (double)K <= of.room[1] ? (int64_t)of.room[1] : 0;
}

/* Reads a call's sizes and its batch; 0 if Python has to plan it, or to refuse it. */
static int read_call(PyObject *const *given, Shape *s, int64_t *keys, int64_t *room, int64_t *chunks,
                     Lengths *x, int64_t *tokens, int64_t *num_bounds, int *bits) {
    DLTensor q, v, on_gpu, known;
    DLTensor *to[] = {&q, &v, &on_gpu, &known};
    for (int i = 0; i < 4; i++)
        if (!is_plain(given[i]) || torch.api->from_python(given[i], to[i])) return 0;
    if (q.ndim != 4 || v.ndim != 4 || on_gpu.ndim != 1 || known.ndim != 1) return 0;
    if (q.device.type != torch.device_type || known.device.type != CPU) return 0;
    if (known.shape[0] != on_gpu.shape[0] || known.shape[0] < 2 || known.strides[0] != 1) return 0;
    if (known.dtype.code || (known.dtype.bits != 32 && known.dtype.bits != 64)) return 0;
    *keys = q.shape[2], s->K = q.shape[DIMENSION_K];
    s->heads = v.shape[2], s->V = v.shape[DIMENSION_K];
    *tokens = q.shape[1], *num_bounds = known.shape[0], *bits = known.dtype.bits;
    *room = room_of(s->K);
    int has_kernels = *room && s->heads > 0 && s->V > 0 && s->V % (int64_t)of.width[WIDTHS - 1] == 0;
    return has_kernels && known.shape[0] <= SEQUENCES && read_bounds(&known, *tokens, chunks, x);
}

/* plans(q, v, cu_seqlens, cu_seqlens_cpu, SMs, exact, trains)

   Returns bytes, which are equal for calls that are planned alike: int64 numbers, the last eight of
   which are the forward's kernel, its segments' chunks or 0, whether they have the bound, equal
   shares, one length, segments kept, the backward's segments' chunks or 0, and its columns. None
   where Python has to plan, or QLA_CHECK compares the bounds. */
static PyObject *plans(PyObject *self, PyObject *const *given, Py_ssize_t n) {
    static Lengths x;
    static int64_t chunks[SEQUENCES];
    int64_t keys, room, tokens, num_bounds, most = 0;
    int bits, kept = 0, width = 0;
    Shape s;
    if (n != 7) { PyErr_SetString(PyExc_TypeError, "qla_kernels: plans takes 7"); return NULL; }
    s.sms = PyLong_AsLongLong(given[4]);
    int exact = PyObject_IsTrue(given[5]), trains = PyObject_IsTrue(given[6]);
    if (PyErr_Occurred()) return NULL;
    if (!of.chunk || asked_for("QLA_CHECK") || !read_call(given, &s, &keys, &room, chunks, &x,
                                                          &tokens, &num_bounds, &bits)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    double bound = of.bound[exact], gradient_bound = of.gradient_bound[exact];
    Plan p = forward(&x, &s, room, bound);
    if (x.n > 1) p = in_order(p, &x, chunks, num_bounds - 1, &s, room);
    if (trains) {
        kept = p.segment_chunks && keeps(&x, &s, room, keys, p.segment_chunks, gradient_bound);
        if (kept) {
            int64_t slots = tokens / (p.segment_chunks * (int64_t)of.chunk);
            most = tokens / (int64_t)of.chunk / (slots > 1 ? slots : 1);
            if (most < 1) most = 1;
            if (!kept_is_faster(&x, &s, most, gradient_bound)) most = 0;
        } else most = backward(&x, &s, gradient_bound);
        width = width_of(&x, most, &s);
    }
    int64_t key[] = {keys, s.K, s.heads, s.V, s.sms, num_bounds, bits, exact, trains, p.kernel,
                     p.segment_chunks, p.bound > -__builtin_inf(), p.shares, x.n == 1, kept, most,
                     width};
    return PyBytes_FromStringAndSize((const char *)key, sizeof key);
}
