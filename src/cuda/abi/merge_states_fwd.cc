// The C functions of merge_states_fwd.
#include <array>

#include "abi/call.h"
#include "abi/merge_states_problem.h"
#include "merge_states/kernel_table.h"

namespace flashvar {

#include "merge_states_fwd_kernels.inc"  // kMergeStatesFwdKernels: generated; ends with null

namespace {

struct MergeStatesFwd {
  using Params = flashvar_merge_states_fwd_params;
  using Kernel = MergeStatesFwdKernel;
  static constexpr const char* kName = "merge_states_fwd";
  static constexpr size_t kFirstSize = 208;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status const status = check_merge_states(p.problem);
    return status == FLASHVAR_OK
               ? find_kernel_of_dtype(kName, kMergeStatesFwdKernels, p.problem.dtype, kernel)
               : status;
  }

  static bool is_empty(const Params& p) { return flashvar::is_empty(p.problem); }

  static std::array<Pointer, 3> required(const Params& p) {
    return {{outs_pointer(p.problem),
             lses_pointer(p.problem),
             {"out.data", p.out.data, p.problem.head_dim > 0}}};
  }

  static merge_states::FwdProblem problem(const Params& p) {
    return {merge_states_problem(p.problem), view(p.out), p.lse};
  }
};

}  // namespace
}  // namespace flashvar

FLASHVAR_DEFINE_C_FUNCTIONS(merge_states_fwd, MergeStatesFwd)
