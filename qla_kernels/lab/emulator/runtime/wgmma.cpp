// The tensor cores: instructions queue per warpgroup and run when a wait asks for them.
#include "../device/wgmma.h"

#include <cmath>

#include "launch.h"

namespace emu {

namespace {

constexpr int kRows = 64, kMaxColumns = 256, kMaxDepth = 16;

// Where element (mn, k) of a shared operand is. Tiles are made of core matrices of 8 rows; with a
// swizzle, a row spans `span` bytes. K-major: rows run along mn; MN-major: rows run along k.
uint32_t element_address(uint64_t descriptor, bool mn_major, int bytes, int mn, int k) {
  constexpr uint32_t log2_spans[] = {4, 7, 6, 5};  // by layout: none, 128B, 64B, 32B
  uint32_t start = uint32_t(descriptor & 0x3fff) << 4;
  uint32_t leading = uint32_t(descriptor >> 16 & 0x3fff) << 4;
  uint32_t stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
  uint32_t layout = uint32_t(descriptor >> 62);
  uint32_t log2_span = log2_spans[layout], span = 1u << log2_span;
  uint32_t row = mn_major ? k : mn, column = (mn_major ? mn : k) * bytes;
  uint32_t address = start + row % 8 * span;
  if (layout && !mn_major) address += row / 8 * stride + column;
  else if (layout)
    address += row / 8 * stride + (column >> log2_span) * leading + (column & (span - 1));
  else if (!mn_major) address += row / 8 * stride + column / 16 * leading + column % 16;
  else address += row / 8 * leading + column / 16 * stride + column % 16;
  return layout ? swizzled(address, span) : address;
}

// Visits a shared operand in pieces of 16 bytes: visit(address, mn, k) of the first element. The
// others of a piece are the next along k, or along mn if that is the operand's major dimension.
template <class Visit>
void visit_operand(uint64_t descriptor, bool mn_major, int bytes, int rows, int depth, Visit visit) {
  int per = 16 / bytes, along_mn = mn_major ? per : 1, along_k = mn_major ? 1 : per;
  for (int mn = 0; mn < rows; mn += along_mn)
    for (int k = 0; k < depth; k += along_k)
      visit(element_address(descriptor, mn_major, bytes, mn, k), mn, k);
}

template <class Visit>
void visit_operands(const Wgmma& w, Visit visit) {
  const WgmmaShape& shape = w.shape;
  auto pieces = [&](uint32_t address, int, int) { visit(address); };
  if (!shape.a_in_registers)
    visit_operand(w.a, shape.a_mn_major, bytes_of(shape.a), kRows, shape.k, pieces);
  visit_operand(w.b, shape.b_mn_major, bytes_of(shape.b), shape.n, shape.k, pieces);
}

// put(mn, k, value) of every element of a shared operand.
template <tl::DataType type, class Put>
void read_operand(uint64_t descriptor, bool mn_major, int rows, int depth, Put put) {
  constexpr int bytes = bytes_of(type);
  visit_operand(descriptor, mn_major, bytes, rows, depth, [&](uint32_t address, int mn, int k) {
    float values[16 / bytes];
    for (int i = 0; i < 16 / bytes; ++i)
      values[i] = matrix_element(type, shared_pointer(address + i * bytes));
    if (mn_major)
      for (int i = 0; i < 16 / bytes; ++i) put(mn + i, k, values[i]);
    else
      for (int i = 0; i < 16 / bytes; ++i) put(mn, k + i, values[i]);
  });
}
template <class Put>
void read_operand(tl::DataType type, uint64_t descriptor, bool mn_major, int rows, int depth,
                  Put put) {
  using enum tl::DataType;
  if (type == kBFloat16) read_operand<kBFloat16>(descriptor, mn_major, rows, depth, put);
  else if (type == kFloat16) read_operand<kFloat16>(descriptor, mn_major, rows, depth, put);
  else read_operand<kTensorFloat32>(descriptor, mn_major, rows, depth, put);
}

using Eight = float __attribute__((vector_size(32)));

struct Operands {
  alignas(32) float a[kRows][kMaxDepth], b[kMaxDepth][kMaxColumns], d[kRows][kMaxColumns];
};

// d = a b, of 4 rows and 8 `eights` columns.
template <int eights>
void multiply(Operands& x, int row, int column, int depth) {
  Eight sums[4][eights] = {};
  for (int k = 0; k < depth; ++k) {
    auto* b = reinterpret_cast<const Eight*>(&x.b[k][column]);
    for (int r = 0; r < 4; ++r)
      for (int i = 0; i < eights; ++i) sums[r][i] += x.a[row + r][k] * b[i];
  }
  for (int r = 0; r < 4; ++r) std::memcpy(&x.d[row + r][column], sums[r], sizeof sums[r]);
}

// Thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 and 8 below.
int row_of(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

float register_element(const Wgmma& w, int row, int k) {
  int per = 4 / bytes_of(w.shape.a);  // elements per 32-bit register
  int pair = k / per;
  int thread = row / 16 * 32 + row % 8 * 4 + pair % 4;
  int r = row % 16 / 8 + pair / 4 * 2;
  auto* bytes = reinterpret_cast<const uint8_t*>(w.a_registers[thread] + r);
  return matrix_element(w.shape.a, bytes + k % per * bytes_of(w.shape.a));
}

void execute(Wgmma& w) {
  static thread_local Operands x;
  const WgmmaShape& shape = w.shape;
  visit_operands(w, [&](uint32_t address) {
    if (!overwritten(address, w.time)) return;
    note(w.where, about_overwritten("wgmma", w.where, address));
    w.invalid = true;
  });
  if (shape.a_in_registers) {
    for (int m = 0; m < kRows; ++m)
      for (int k = 0; k < shape.k; ++k) x.a[m][k] = shape.a_sign * register_element(w, m, k);
  } else {
    read_operand(shape.a, w.a, shape.a_mn_major, kRows, shape.k,
                 [&](int m, int k, float value) { x.a[m][k] = shape.a_sign * value; });
  }
  read_operand(shape.b, w.b, shape.b_mn_major, shape.n, shape.k,
               [&](int n, int k, float value) { x.b[k][n] = shape.b_sign * value; });
  for (int row = 0; row < kRows; row += 4) {
    int column = 0;
    for (; column + 16 <= shape.n; column += 16) multiply<2>(x, row, column, shape.k);
    if (column < shape.n) multiply<1>(x, row, column, shape.k);
  }
  for (int t = 0; t < kWarpgroup; ++t) {
    float* c = w.accumulators[t];
    if (w.invalid || !w.accumulate[t]) std::fill(c, c + shape.n / 2, w.invalid ? NAN : 0.0f);
    for (int i = 0; i < shape.n / 2; i += 4)  // 2 columns of 2 rows, of every 8 columns
      for (int half = 0; half < 2; ++half)
        for (int j = 0; j < 2; ++j)
          c[i + half * 2 + j] += x.d[row_of(t) + half * 8][i * 2 + t % 4 * 2 + j];
  }
}

int my_group() { return current->index / kWarpgroup; }
WgmmaQueue& my_queue() { return block->warpgroups[my_group()]; }

// Instructions that every thread of the warpgroup has issued and some wait has covered are forgotten.
void drop_finished(WgmmaQueue& queue) {
  for (; queue.first < queue.done; ++queue.first) queue.instructions.pop_front();
}

}  // namespace

void issue_wgmma(const WgmmaShape& shape, uint64_t a, const uint32_t* a_registers, uint64_t b,
                 float* accumulators, bool accumulate, Where where) {
  if (block->size() % kWarpgroup) fail("wgmma in a block of %d threads", block->size());
  WgmmaQueue& queue = my_queue();
  size_t position = size_t(current->wgmmas_issued++ - queue.first);
  if (position >= queue.instructions.size()) queue.instructions.resize(position + 1);
  Wgmma& w = queue.instructions[position];
  if (w.issued && !(w.shape == shape && w.a == a && w.b == b))
    fail("wgmma: threads of one warpgroup issue different instructions");
  int t = current->index % kWarpgroup;
  w.shape = shape;
  w.a = a;
  w.b = b;
  w.a_registers[t] = a_registers;
  w.accumulators[t] = accumulators;
  w.accumulate[t] = accumulate;
  if (!w.issued) {  // the first of them: another may signal that it is done before the last issues
    w.where = where;
    queue.lines.push_back(where);
    visit_operands(w, [&](uint32_t address) {
      if (owned(address))
        block->shared->reads[address / Write::kBytes].products[my_group()] =
            uint32_t(queue.lines.size());
      if (unordered(address)) note(where, "wgmma" + at(where) + " " + about_unordered(address));
      else if (unfenced(address)) note(where, about_unfenced("wgmma", where, address));
      else return;
      w.invalid = true;
    });
  }
  if (++w.issued == kWarpgroup) w.time = ++block->clock;
  current->wgmmas.last_used = current->wgmmas.open;
  current->known.issued[my_group()] = uint32_t(current->wgmmas_issued);
}

void commit_wgmmas() {
  current->wgmmas_committed.push_back(current->wgmmas_issued);
  current->wgmmas.commit();
}

void wait_for_wgmmas(int in_flight, Where where) {
  Groups& groups = current->wgmmas;
  int last = groups.open - 1 - in_flight;
  if (last <= groups.last_waited) return;
  long needed = current->wgmmas_committed[last];
  groups.last_waited = last;

  WgmmaQueue& queue = my_queue();
  auto all_issued = [&] {
    for (long i = queue.first; i < needed; ++i)
      if (queue.instructions[i - queue.first].issued < kWarpgroup) return false;
    return true;
  };
  wait_until(all_issued, [&] {
    return "waiting for the rest of the warpgroup to issue its wgmma" + at(where);
  });
  if (queue.requested < needed) {
    queue.requested = needed;
    bool at_once = block->schedule == Schedule::Eager || one_in(2);
    queue.busy = at_once ? 0 : one_in(2) ? WgmmaQueue::kLatest : int(random_bits() % 32);
  }
  // a wait for later ones, by a thread that is ahead, holds nobody up who waits for these
  wait_until([&] { return queue.busy == 0 || queue.done >= needed; },
             [&] { return "waiting for wgmma" + at(where); });
  for (; queue.done < needed; ++queue.done)
    execute(queue.instructions[queue.done - queue.first]);
  uint32_t& known = current->known.done[my_group()];
  known = std::max(known, uint32_t(needed));
  drop_finished(queue);
}

}  // namespace emu
