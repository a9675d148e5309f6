// TMA boxes, bulk copies and cp.async: issued now, carried out when the scheduler lands them.
#include "../device/cp_async.h"
#include "../device/tma.h"

#include "../device/atomics.h"

namespace emu {

namespace {

void note_load(Barrier& barrier) {
  MBarrier& state = barrier.state("load");
  state.loaded = std::max(state.loaded, state.phase);
  state.told.hear();
}

int copies_of(const Barrier& barrier) { return int(barrier.word % kCopies); }

// The bytes of a load are there: its mbarrier tells so.
void landed(Barrier& barrier, const void* shared, uint32_t bytes, Writer writer) {
  writer.copy = copies_of(barrier);
  note_write(shared, bytes, writer);
  MBarrier& state = barrier.state("load");
  state.told.written.until[kMostWarps + copies_of(barrier)] = block->clock++;
  state.complete(bytes);
}

template <class Land>
void start_store(uint32_t shared, uint32_t bytes, Land land) {
  constexpr const char* reader = "a TMA store";
  for (uint32_t i = shared; i < shared + bytes; i += Write::kBytes) {
    if (unordered(i)) fail("%s %s", reader, about_unordered(i).c_str());
    if (unfenced(i)) fail("%s", about_unfenced(reader, Where(), i).c_str());
  }
  Groups& groups = current->stores;
  groups.last_used = groups.open;
  start(Copy::TmaStore, groups.open, [=, issued = ++block->clock] {
    for (uint32_t i = shared; i < shared + bytes; i += Write::kBytes)
      if (overwritten(i, issued)) fail("%s", about_overwritten(reader, Where(), i).c_str());
    land();
  });
}

// Visits a box in pieces of up to 16 bytes, which the swizzle keeps together:
// visit(global address or nullptr outside the tensor, shared address, bytes).
template <class Visit>
void visit_box(const Box& box, Visit visit) {
  const TensorMap& map = *box.map;
  int extent[5] = {1, 1, 1, 1, 1};
  std::copy(map.box, map.box + map.rank, extent);
  int piece = std::min(16 / map.element_bytes, extent[0]);
  uint32_t linear = box.shared;
  int i[5];
  for (i[4] = 0; i[4] < extent[4]; ++i[4])
    for (i[3] = 0; i[3] < extent[3]; ++i[3])
      for (i[2] = 0; i[2] < extent[2]; ++i[2])
        for (i[1] = 0; i[1] < extent[1]; ++i[1]) {
          bool inside = true;
          int64_t offset = 0;
          for (int d = 1; d < map.rank; ++d) {
            int64_t at = box.corner[d] + i[d];
            inside &= at >= 0 && at < int64_t(map.dim[d]);
            offset += at * int64_t(map.stride[d]);
          }
          for (int x = 0; x < extent[0]; x += piece) {
            int64_t first = box.corner[0] + x;
            bool whole = inside && first >= 0 && first + piece <= int64_t(map.dim[0]);
            int count = whole ? piece : 1;  // elements at a time
            for (int e = 0; e < piece; e += count) {
              int64_t at = first + e;
              bool valid = inside && at >= 0 && at < int64_t(map.dim[0]);
              uint8_t* global = map.address + offset + at * map.element_bytes;
              visit(valid ? global : nullptr, swizzled(linear, map.swizzle_span),
                    count * map.element_bytes);
              linear += count * map.element_bytes;
            }
          }
        }
}

uint32_t box_bytes(const TensorMap& map) {
  uint32_t bytes = map.element_bytes;
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

void check_bulk(const char* operation, const void* global, const void* shared, uint32_t bytes) {
  if (reinterpret_cast<uint64_t>(global) % 16 || shared_address(shared) % 16 || bytes % 16)
    fail("%s: global address, shared address %u and size %u must be multiples of 16", operation,
         shared_address(shared), bytes);
}

}  // namespace

Box checked_box(const char* operation, const CUtensorMap& descriptor, const void* shared,
                std::initializer_list<int64_t> corner) {
  const TensorMap& map = descriptor.map;
  if (map.magic != TensorMap::kMagic) fail("%s: not a tensor map", operation);
  if (corner.size() != map.rank)
    fail("%s: %zu coordinates for a tensor map of rank %d", operation, corner.size(), map.rank);
  Box box{&map, {}, shared_address(shared)};
  if (box.shared % 128)
    fail("%s: shared address %u is not a multiple of 128", operation, box.shared);
  if (!is_shared(static_cast<const uint8_t*>(shared) + box_bytes(map)))
    fail("%s: a box of %u bytes at shared address %u passes the end of shared memory", operation,
         box_bytes(map), box.shared);
  std::copy(corner.begin(), corner.end(), box.corner);
  return box;
}

void tma_load(const Box& box, Barrier& barrier) {
  note_load(barrier);
  start(Copy::TmaLoad, 0, [box, &barrier, writer = this_thread()] {
    int fill = box.map->fill_nan ? 0xff : 0;
    visit_box(box, [&](const uint8_t* global, uint32_t shared, int bytes) {
      if (global) std::memcpy(shared_pointer(shared), global, bytes);
      else std::memset(shared_pointer(shared), fill, bytes);
    });
    landed(barrier, shared_pointer(box.shared), box_bytes(*box.map), writer);
  });
}

void tma_store(const Box& box) {
  start_store(box.shared, box_bytes(*box.map), [box] {
    visit_box(box, [](uint8_t* global, uint32_t shared, int bytes) {
      if (global) std::memcpy(global, shared_pointer(shared), bytes);
    });
  });
}

void tma_store_add(const Box& box) {
  if (box.map->type != MapType::F32 && box.map->type != MapType::BF16)
    fail("tma_store_add: the emulator adds float32 and bfloat16, not type %d",
         int(box.map->type));
  start_store(box.shared, box_bytes(*box.map), [box] {
    visit_box(box, [&](uint8_t* global, uint32_t shared, int bytes) {
      if (!global) return;
      const uint8_t* source = shared_pointer(shared);
      for (int i = 0; i < bytes; i += box.map->element_bytes) {
        if (box.map->type == MapType::F32)
          atomic_add(reinterpret_cast<float*>(global + i),
                     *reinterpret_cast<const float*>(source + i));
        else
          atomic_add(reinterpret_cast<bfloat16_t*>(global + i),
                     *reinterpret_cast<const bfloat16_t*>(source + i));
      }
    });
  });
}

void bulk_load(void* shared, const void* global, Barrier& barrier, uint32_t bytes) {
  check_bulk("bulk load", global, shared, bytes);
  note_load(barrier);
  start(Copy::TmaLoad, 0, [=, &barrier, writer = this_thread()] {
    std::memcpy(shared, global, bytes);
    landed(barrier, shared, bytes, writer);
  });
}

void bulk_store(void* global, const void* shared, uint32_t bytes) {
  check_bulk("bulk store", global, shared, bytes);
  start_store(shared_address(shared), bytes, [=] { std::memcpy(global, shared, bytes); });
}

void bulk_store_add(float* global, const float* shared, uint32_t bytes) {
  check_bulk("bulk store-add", global, shared, bytes);
  start_store(shared_address(shared), bytes, [=] {
    for (uint32_t i = 0; i < bytes / 4; ++i) atomic_add(global + i, shared[i]);
  });
}

void wait_for_groups(Copy kind, Groups& groups, int in_flight) {
  int last = groups.open - 1 - in_flight;
  if (kind == Copy::TmaStore) {  // others go on while a store reads; of cp.async there are too many
    auto mine = [&, me = current](const Pending& copy) {
      return copy.issuer == me && copy.kind == kind && copy.group <= last;
    };
    const auto& pending = block->pending;
    wait_until([&] { return std::none_of(pending.begin(), pending.end(), mine); },
               [] { return std::string("waiting for its TMA store"); });
  }
  finish(current, kind, last);
  groups.last_waited = std::max(groups.last_waited, last);
}

void cp_async(void* shared, const void* global, int bytes, bool copy) {
  if (shared_address(shared) % bytes || (copy && reinterpret_cast<uint64_t>(global) % bytes))
    fail("cp.async: addresses must be multiples of its %d bytes", bytes);
  Groups& groups = current->cp_asyncs;
  groups.last_used = groups.open;
  start(Copy::CpAsync, groups.open, [=, writer = this_thread()] {
    note_write(shared, bytes, writer);
    if (copy) std::memcpy(shared, global, bytes);
    else std::memset(shared, 0, bytes);
  });
}

void arrive_after_cp_async(Barrier& barrier) {
  note_load(barrier);
  Thread* issuer = current;
  int group = issuer->cp_asyncs.open;
  issuer->cp_asyncs.commit();
  issuer->cp_asyncs.last_waited = group;
  start(Copy::CpAsyncArrive, group, [=, &barrier] {
    finish(issuer, Copy::CpAsync, group);
    MBarrier& state = barrier.state("cp.async arrive");
    state.told.written.until[issuer->index / kWarp] = block->clock++;
    state.arrive();
  });
}

}  // namespace emu
