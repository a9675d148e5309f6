// One launch: reads the arguments that process.py wrote to standard input, and calls the wrapper.
//
//   option NAME VALUE
//   region FILE_OFFSET SKIP BYTES NAMES        one storage of the shared file, from a page's byte on
//   tensor REGION BYTE_OFFSET CODE BITS NDIM shape... strides...
//   int VALUE | float VALUE | bool VALUE | none
#include <deque>
#include <iostream>

#include "launch.h"

namespace emu {

namespace {

constexpr int kCuda = 2;

struct Tensor {
  DLTensor header{};
  std::vector<int64_t> shape, strides;
};

void read_option(int& file) {
  std::string name, text;
  std::cin >> name >> text;
  if (name == "file") file = std::stoi(text);
  else if (name == "seed") options.seed = std::stoull(text);
  else if (name == "time_limit") options.time_limit = std::stod(text);
  else if (name == "workers") options.workers = std::stoi(text);
  else if (name == "share_named_barriers") options.share_named_barriers = text == "1";
  else if (name == "schedule" && text == "random") options.schedule = Schedule::Random;
  else if (name == "schedule" && text == "late") options.schedule = Schedule::Late;
  else if (name == "schedule" && text == "eager") options.schedule = Schedule::Eager;
}

TVMFFIAny read_argument(const std::string& kind, std::deque<Tensor>& tensors) {
  TVMFFIAny any{};
  if (kind == "int" || kind == "bool") {
    any.type_index = kind == "int" ? kTVMFFIInt : kTVMFFIBool;
    std::cin >> any.v_int64;
  } else if (kind == "float") {
    std::string text;
    std::cin >> text;
    any.type_index = kTVMFFIFloat;
    any.v_float64 = std::stod(text);
  } else if (kind == "tensor") {
    size_t region, offset;
    int code, bits, rank;
    std::cin >> region >> offset >> code >> bits >> rank;
    Tensor& tensor = tensors.emplace_back();
    tensor.shape.resize(rank);
    tensor.strides.resize(rank);
    for (int64_t& extent : tensor.shape) std::cin >> extent;
    for (int64_t& stride : tensor.strides) std::cin >> stride;
    bool empty = regions[region].bytes == 0;
    tensor.header = {empty ? nullptr : regions[region].begin + offset,
                     {kCuda, 0},
                     rank,
                     {uint8_t(code), uint8_t(bits), 1},
                     tensor.shape.data(),
                     tensor.strides.data(),
                     0};
    any.type_index = kTVMFFIDLTensorPtr;
    any.v_ptr = &tensor.header;
  }
  return any;
}

}  // namespace

}  // namespace emu

int main() {
  using namespace emu;
  int file = -1;
  std::vector<TVMFFIAny> arguments;
  std::deque<Tensor> tensors;
  for (std::string word; std::cin >> word;) {
    if (word == "option") {
      read_option(file);
    } else if (word == "region") {
      Region region;
      long offset;
      size_t skip;
      std::cin >> offset >> skip >> region.bytes >> region.names;
      region.begin = region.bytes ? map_guarded(skip + region.bytes, kPage, file, offset) + skip
                                  : nullptr;
      regions.push_back(region);
    } else {
      arguments.push_back(read_argument(word, tensors));
    }
  }
  TVMFFIAny result{};
  return __tvm_ffi_main(nullptr, arguments.data(), int(arguments.size()), &result);
}
