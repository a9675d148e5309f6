// What TileLang's generated host wrapper needs of TVM's runtime: three types and three functions.
//
// The wrapper checks arguments, encodes tensor maps and launches kernels; it reaches the device
// only through TVMFFIFunctionCall, which host.cpp answers.
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct DLDevice {
  int32_t device_type, device_id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct TVMFFIAny {
  int32_t type_index;
  uint32_t zero_padding;
  union {
    int64_t v_int64;
    double v_float64;
    void* v_ptr;
  };
};
enum { kTVMFFINone = 0, kTVMFFIInt = 1, kTVMFFIBool = 2, kTVMFFIFloat = 3, kTVMFFIOpaquePtr = 4,
       kTVMFFIDLTensorPtr = 7 };

extern "C" {
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
int TVMBackendGetFuncFromEnv(void* module, const char* name, void** function);
int TVMFFIFunctionCall(void* function, TVMFFIAny* arguments, int count, TVMFFIAny* result);

// The generated entry point.
int32_t __tvm_ffi_main(void* self, void* arguments, int count, void* result);
}
