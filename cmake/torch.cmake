# Lets a library call torch through its stable ABI (torch/csrc/stable), as of one version of torch.
#
#   flashvar_call_torch(my_binary)        # after flashvar_link_manylinux(my_binary ...)
#
# The plan sets FLASHVAR_TORCH_DIR, the folder of torch in the Python that builds, and
# FLASHVAR_TORCH_TARGET, the oldest version to support: torch's headers hide newer functions. The
# library then needs torch's libraries, so `import torch` must come before it is loaded.

include_guard(GLOBAL)

function(flashvar_call_torch target)
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=${FLASHVAR_TORCH_TARGET})
  target_include_directories(${target} SYSTEM PRIVATE "${FLASHVAR_TORCH_DIR}/include")
  # -l:name and not a path: the path would become a part of the library.
  target_link_options(${target} PRIVATE
    "-L${FLASHVAR_TORCH_DIR}/lib" "LINKER:-rpath-link,${FLASHVAR_TORCH_DIR}/lib")
  # --as-needed is on: a library that calls nothing in libtorch_cuda.so does not need it, and loads
  # beside a torch without CUDA too.
  target_link_libraries(${target} PRIVATE -l:libtorch_cpu.so)
  if(EXISTS "${FLASHVAR_TORCH_DIR}/lib/libtorch_cuda.so")
    target_link_libraries(${target} PRIVATE -l:libtorch_cuda.so)
  endif()
endfunction()
