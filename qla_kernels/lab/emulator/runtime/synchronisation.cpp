// mbarriers, named barriers and warp meetings.
#include "../device/mbarrier.h"
#include "../device/named_barrier.h"
#include "../device/shared_memory.h"
#include "../device/warp.h"
#include "launch.h"

// ---- mbarriers ----

namespace emu {

void MBarrier::end_phase_if_complete() {
  if (missing || bytes) return;
  ++phase;
  missing = expected;
  tells = told;
}

void MBarrier::arrive() {
  if (!missing)
    fail("%s: more arrivals than its count of %d in phase %ld, which still needs %ld bytes: every "
         "thread that executes an arrive counts", name.c_str(), expected, phase, bytes);
  --missing;
  end_phase_if_complete();
}

void MBarrier::complete(long count) {
  bytes -= count;
  end_phase_if_complete();
}

std::string MBarrier::describe(int parity) const {
  std::string needs;
  if (missing) needs += format("%d of %d arrivals", missing, expected);
  if (bytes) needs += format("%s%ld bytes", missing ? " and " : "", bytes);
  return format("%s, parity %d: phase %ld is open and needs %s", name.c_str(), parity & 1, phase,
                needs.c_str());
}

void name_mbarriers(const char* name, const void* first, int count) {
  auto& names = block->mbarrier_names;
  if (names.contains(first)) return;  // every thread passes the declaration
  for (int i = 0; i < count; ++i)
    names.try_emplace(static_cast<const Barrier*>(first) + i,
                      count == 1 ? std::string(name) : format("%s[%d]", name, i));
}

static void saw(MBarrier& barrier, uint64_t number) {
  barrier.seen = std::max(barrier.seen, barrier.phase);
  current->guard = int(number);
  barrier.tells.tell();
}

bool owned(uint32_t shared) {
  const Write& write = block->shared->writes[shared / Write::kBytes];
  if (!write.time || write.guard < 0) return write.time;
  return block->mbarriers[write.guard].arrived[current->index / kWarpgroup] <= write.time;
}

}  // namespace emu

void Barrier::init(uint32_t count) {
  if (count < 1 || count > 0xfffff) emu::fail("mbarrier initialised with count %u", count);
  auto& barriers = emu::block->mbarriers;
  auto name = emu::block->mbarrier_names.find(this);
  word = barriers.size();
  emu::MBarrier& state = barriers.emplace_back();
  state.name = name != emu::block->mbarrier_names.end()
                   ? name->second
                   : emu::format("mbarrier number %zu", barriers.size() - 1);
  state.expected = state.missing = int(count);
}

emu::MBarrier& Barrier::state(const char* operation) {
  auto& barriers = emu::block->mbarriers;
  if (word >= barriers.size())
    emu::fail("%s on an mbarrier that was never initialised", operation);
  return barriers[word];
}

void Barrier::arrive() {
  emu::MBarrier& barrier = state("arrive");
  barrier.told.hear();
  barrier.arrived[emu::current->index / emu::kWarpgroup] = emu::block->clock;
  barrier.arrive();
}

void Barrier::wait(int parity, emu::Where where) {
  emu::MBarrier& barrier = state("wait");
  emu::wait_until([&] { return barrier.passed(parity); },
                  [&] { return "waiting for " + barrier.describe(parity) + emu::at(where); });
  emu::saw(barrier, word);
}

bool Barrier::try_wait(int parity) {
  emu::MBarrier& barrier = state("try_wait");
  if (!barrier.passed(parity)) emu::suspend();  // let the others move: callers poll
  if (!barrier.passed(parity)) return false;
  emu::saw(barrier, word);
  return true;
}

namespace emu {

// ---- named barriers ----

namespace {

std::string list(uint32_t warps) {
  std::string text;
  for (int i = 0; i < 32; ++i)
    if (warps >> i & 1) text += format("%s%d", text.empty() ? "" : ",", i);
  return text;
}

// Two sets of warps that use one id can release each other, whether or not they did in this run.
void check_use(NamedBarrier& barrier, int id, const std::string& where) {
  for (const NamedBarrier::Use& use : barrier.uses) {
    if (use.warps == barrier.warps) return;
    bool disjoint = !(use.warps & barrier.warps);
    if ((disjoint || use.count == barrier.count) && !options.share_named_barriers)
      fail("named barrier %d is shared: warps %s with count %d%s and warps %s with count %d%s can "
           "release each other (T.reduce_* across warps uses ids 1 and 2, automatic syncs count up "
           "from 3)", id, list(use.warps).c_str(), use.count, use.where.c_str(),
           list(barrier.warps).c_str(), barrier.count, where.c_str());
  }
  barrier.uses.push_back({barrier.warps, barrier.count, where});
}

}  // namespace

void named_barrier(int id, int count, bool wait, Where where) {
  if (id < 0 || id >= int(block->named_barriers.size()))
    fail("named barrier %d: ids are 0 to 15%s", id, at(where).c_str());
  if (count % kWarp && count != block->size())
    fail("named barrier %d: count %d is not a multiple of 32%s", id, count, at(where).c_str());
  NamedBarrier& barrier = block->named_barriers[id];
  int thread = current->index;
  if (barrier.present.empty()) barrier.present.resize(block->size());
  if (barrier.arrived && barrier.count != count)
    fail("named barrier %d: count %d%s while %d threads arrived with count %d", id, count,
         at(where).c_str(), barrier.arrived, barrier.count);
  if (barrier.present[thread])
    fail("named barrier %d: thread %d arrives twice in one phase%s: two uses share the id, or the "
         "count %d is too large", id, thread, at(where).c_str(), count);

  barrier.count = count;
  barrier.present[thread] = true;
  barrier.warps |= 1u << thread / kWarp;
  barrier.told.hear();
  long phase = barrier.phase;
  if (++barrier.arrived == count) {
    check_use(barrier, id, at(where));
    barrier.present.assign(block->size(), false);
    barrier.arrived = 0;
    barrier.warps = 0;
    barrier.tells = barrier.told;
    ++barrier.phase;
  }
  if (!wait) return;
  wait_until([&] { return barrier.phase != phase; },
             [&] {
               return format("waiting at named barrier %d: %d of %d threads are there", id,
                             barrier.arrived, barrier.count) + at(where);
             });
  barrier.tells.tell();
}

// ---- warp meetings ----

std::shared_ptr<const Meeting> meet(const char* kind, uint32_t mask, const Payload& mine,
                                    const Where& where) {
  int warp = current->index / kWarp;
  int lanes = std::min(kWarp, block->size() - warp * kWarp);
  if (lanes < kWarp) mask &= (1u << lanes) - 1;
  uint32_t me = 1u << lane();
  if (!(mask & me)) fail("%s: lane %d is not in its mask %08x%s", kind, lane(), mask,
                         at(where).c_str());

  auto& open = block->meetings[warp];
  std::shared_ptr<Meeting> meeting;
  for (auto& candidate : open)
    if (candidate->mask == mask && !(candidate->present & me)) meeting = candidate;
  if (!meeting) {
    meeting = std::make_shared<Meeting>(Meeting{kind, mask, 0, {}, {}});
    open.push_back(meeting);
  }
  if (meeting->kind != kind && std::string(meeting->kind) != kind)
    fail("warp %d: lane %d executes %s%s while other lanes execute %s", warp, lane(), kind,
         at(where).c_str(), meeting->kind);

  meeting->payloads[lane()] = mine;
  meeting->present |= me;
  meeting->told.join(current->known);
  if (meeting->present == mask) std::erase(open, meeting);
  wait_until([&] { return meeting->present == mask; },
             [&] {
               return format("waiting in %s for lanes %08x of the warp", kind,
                             mask & ~meeting->present) + at(where);
             });
  current->known.join(meeting->told);
  return meeting;
}

}  // namespace emu
