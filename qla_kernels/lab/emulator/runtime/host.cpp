// The device side of the host wrapper: tensor maps with the driver's checks, kernel launches.
#include "host.h"

#include <cstring>
#include <map>

#include "../device/tensor_map.h"
#include "launch.h"

namespace emu {

namespace {

struct Function {
  int (*call)(const Function& self, const TVMFFIAny* arguments, int count);
  const Kernel* kernel = nullptr;
};

int set_device(const Function&, const TVMFFIAny*, int) { return 0; }

// cuTensorMapEncodeTiled(map, type, rank, address, dims, strides, box, element strides, interleave,
//                        swizzle, l2 promotion, fill); the first stride is the element's size.
int create_tensor_map(const Function&, const TVMFFIAny* arguments, int count) {
  static const uint8_t bytes_of[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  const TVMFFIAny* next = arguments;
  auto integer = [&] { return (next++)->v_int64; };

  auto* descriptor = static_cast<CUtensorMap*>((next++)->v_ptr);
  TensorMap map{};
  map.magic = TensorMap::kMagic;
  int64_t type = integer();
  int64_t rank = integer();
  map.address = static_cast<uint8_t*>((next++)->v_ptr);
  if (type < 0 || type >= int64_t(sizeof bytes_of) || rank < 1 || rank > 5 || count != 8 + 4 * rank)
    stop(format("tensor map of type %ld and rank %ld in %d arguments", long(type), long(rank),
                count));
  map.type = MapType(type);
  map.rank = uint8_t(rank);
  map.element_bytes = bytes_of[type];

  std::string wrong;
  auto need = [&](bool condition, const std::string& what) {
    if (!condition && wrong.empty()) wrong = what;
  };
  for (int i = 0; i < rank; ++i) map.dim[i] = uint64_t(integer());
  for (int i = 0; i < rank; ++i) map.stride[i] = uint64_t(integer());
  for (int i = 0; i < rank; ++i) {
    int64_t box = integer();
    need(box >= 1 && box <= 256, format("box[%d] = %ld is not in 1..256", i, long(box)));
    map.box[i] = uint16_t(box);
  }
  for (int i = 0; i < rank; ++i)
    need(integer() == 1, format("element stride %d is not 1 (not modelled)", i));
  need(integer() == 0, "interleaved layouts are not modelled");
  int64_t swizzle = integer();
  need(swizzle >= 0 && swizzle <= 3, format("swizzle mode %ld is not modelled", long(swizzle)));
  map.swizzle_span = swizzle ? uint8_t(16 << (swizzle & 3)) : 0;
  integer();  // l2 promotion
  map.fill_nan = integer() == 1;

  int inner = map.box[0] * map.element_bytes;
  need(reinterpret_cast<uint64_t>(map.address) % 16 == 0, "the address is not 16-byte aligned");
  for (int i = 0; i < rank; ++i) {
    need(map.dim[i] >= 1 && map.dim[i] <= 1ull << 32,
         format("dim[%d] = %lu is not in 1..2^32", i, (unsigned long)map.dim[i]));
    need(i == 0 || (map.stride[i] % 16 == 0 && map.stride[i] < 1ull << 40),
         format("stride[%d] = %lu bytes is not a multiple of 16 below 2^40", i,
                (unsigned long)map.stride[i]));
  }
  need(inner % 16 == 0, format("the inner box is %d bytes, not a multiple of 16", inner));
  need(!swizzle || inner <= map.swizzle_span,
       format("the inner box is %d bytes, wider than the swizzle span %d", inner,
              map.swizzle_span));
  if (!wrong.empty()) {
    std::string shape;
    for (int i = 0; i < rank; ++i)
      shape += format(" | dim %lu stride %lu box %d", (unsigned long)map.dim[i],
                      (unsigned long)map.stride[i], map.box[i]);
    stop("tensor map refused: " + wrong + shape);
  }
  descriptor->map = map;
  return 0;
}

// Launch parameters follow the kernel's own arguments; their names say what they are.
int launch_kernel(const Function& self, const TVMFFIAny* arguments, int count) {
  const Kernel& kernel = *self.kernel;
  if (count != kernel.parameters + int(kernel.launch_parameters.size()))
    stop(format("%s takes %d arguments and %zu launch parameters, got %d", kernel.name,
                kernel.parameters, kernel.launch_parameters.size(), count));
  dim3 grid, shape;
  uint32_t shared_bytes = 0;
  std::map<std::string, unsigned*> known = {
      {"blockIdx.x", &grid.x},   {"blockIdx.y", &grid.y},   {"blockIdx.z", &grid.z},
      {"threadIdx.x", &shape.x}, {"threadIdx.y", &shape.y}, {"threadIdx.z", &shape.z}};
  for (size_t i = 0; i < kernel.launch_parameters.size(); ++i) {
    const std::string& name = kernel.launch_parameters[i];
    unsigned value = unsigned(arguments[kernel.parameters + i].v_int64);
    if (auto place = known.find(name); place != known.end()) *place->second = value;
    else if (name.ends_with("use_dyn_shared_memory")) shared_bytes = value;
    else stop(format("%s needs the launch parameter %s (not modelled)", kernel.name, name.c_str()));
  }
  launch(kernel, grid, shape, shared_bytes, arguments);
  return 0;
}

}  // namespace

}  // namespace emu

using emu::format;
using emu::Function;

void TVMFFIErrorSetRaisedFromCStr(const char*, const char* message) { emu::stop(message); }

int TVMBackendGetFuncFromEnv(void*, const char* name, void** function) {
  static std::map<std::string, Function> functions = {
      {"__tvm_set_device", {emu::set_device}},
      {"__tvm_tensormap_create_tiled", {emu::create_tensor_map}}};
  for (const emu::Kernel& kernel : emu::kernels)
    functions.try_emplace(kernel.name, Function{emu::launch_kernel, &kernel});
  auto found = functions.find(name);
  if (found == functions.end())
    emu::stop(format("the host wrapper calls %s (not modelled)", name));
  *function = &found->second;
  return 0;
}

int TVMFFIFunctionCall(void* function, TVMFFIAny* arguments, int count, TVMFFIAny*) {
  auto& self = *static_cast<Function*>(function);
  return self.call(self, arguments, count);
}
