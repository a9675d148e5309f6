// Everything a translated kernel may use. Read scheduler.h first.
#pragma once

#include "atomics.h"
#include "cp_async.h"
#include "cuda.h"
#include "float16.h"
#include "intrinsics.h"
#include "matrix.h"
#include "mbarrier.h"
#include "misc.h"
#include "mma.h"
#include "named_barrier.h"
#include "reduce.h"
#include "scheduler.h"
#include "shared_memory.h"
#include "tma.h"
#include "warp.h"
#include "wgmma.h"

// Here and not in cuda.h: the standard headers above write __attribute__((__noinline__)).
#define __noinline__ __attribute__((noinline))
