// The C functions of merge_states_bwd.
#include <array>

#include "abi/call.h"
#include "abi/merge_states_problem.h"
#include "merge_states/kernel_table.h"

namespace flashvar {

#include "merge_states_bwd_kernels.inc"  // kMergeStatesBwdKernels: generated; ends with null

namespace {

struct MergeStatesBwd {
  using Params = flashvar_merge_states_bwd_params;
  using Kernel = MergeStatesBwdKernel;
  static constexpr const char* kName = "merge_states_bwd";
  static constexpr size_t kFirstSize = 256;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status const status = check_merge_states(p.problem);
    return status == FLASHVAR_OK
               ? find_kernel_of_dtype(kName, kMergeStatesBwdKernels, p.problem.dtype, kernel)
               : status;
  }

  static bool is_empty(const Params& p) {
    bool const wanted = p.grad_outs.data != nullptr || p.grad_lses != nullptr;
    return !wanted || flashvar::is_empty(p.problem);
  }

  static std::array<Pointer, 3> required(const Params& p) {
    Pointer outs = outs_pointer(p.problem);
    outs.needed = outs.needed && p.grad_lses != nullptr;
    return {{outs,
             lses_pointer(p.problem),
             {"grad_out.data", p.grad_out.data, p.problem.head_dim > 0}}};
  }

  static merge_states::BwdProblem problem(const Params& p) {
    return {merge_states_problem(p.problem), view(p.grad_out), p.grad_lse, view(p.grad_outs),
            p.grad_outs_part_stride,         p.skipped_outs,   p.grad_lses};
  }
};

}  // namespace
}  // namespace flashvar

FLASHVAR_DEFINE_C_FUNCTIONS(merge_states_bwd, MergeStatesBwd)
