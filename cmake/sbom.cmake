# Puts a CycloneDX document of what a library is made of into its wheel (PEP 770).
#
#   flashvar_install_sbom(manifest.json)  # after flashvar_link_manylinux(...)
#
# Only where scikit-build-core builds a wheel: a development build has no .dist-info to hold it. It is
# written during installation: a build rule would not notice another SOURCE_DATE_EPOCH.

include_guard(GLOBAL)
include(${CMAKE_CURRENT_LIST_DIR}/manylinux.cmake)

function(flashvar_install_sbom manifest)
  if(NOT SKBUILD_METADATA_DIR)
    return()
  endif()
  set(here "${CMAKE_CURRENT_FUNCTION_LIST_DIR}")
  cmake_path(GET here PARENT_PATH home)
  flashvar_find_cudart_static(cudart)
  set(parts --cudart "${cudart}")
  flashvar_manylinux_cpu(cpu why_not)
  if(cpu)
    execute_process(
      COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.a
      OUTPUT_VARIABLE libstdcxx OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    list(APPEND parts --libstdcxx "${libstdcxx}"
      --glibc 2.28 --glibc-symbols "${here}/glibc-2.28-${cpu}.syms")
  endif()
  set(command "${CMAKE_COMMAND}" -E env
    # pip's isolated environments are entries of PYTHONPATH.
    --modify "PYTHONPATH=path_list_prepend:${home}/src/python"
    "${Python_EXECUTABLE}" -m flashvar_factory write-sbom
    --manifest "${manifest}" --license "${FLASHVAR_LICENSE}"
    --compiler "${CMAKE_CXX_COMPILER_ID}" "${CMAKE_CXX_COMPILER_VERSION}" ${parts}
    --output "${SKBUILD_METADATA_DIR}/sboms")
  list(JOIN command "]=] [=[" command)
  install(CODE "execute_process(COMMAND [=[${command}]=] COMMAND_ERROR_IS_FATAL ANY)")
endfunction()
