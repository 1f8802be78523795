# Makes the objects of a target the same bytes in whatever folder they are compiled.
#
#   flashvar_reproducible(my_binary)      # after add_library(my_binary ...), in the same folder
#
# The random seed of each file is its name, and the folders of sources, build and toolkit are written
# as relative ones. Line information keeps them: it is for this machine.

include_guard(GLOBAL)

function(flashvar_reproducible target)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    cmake_path(GET source FILENAME name)
    # nvcc hands it on to the host's compiler.
    set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS -frandom-seed=${target}/${name})
  endforeach()
  if(FLASHVAR_LINEINFO)
    return()
  endif()

  cmake_path(GET CMAKE_CURRENT_FUNCTION_LIST_DIR PARENT_PATH home)
  file(REAL_PATH "${CMAKE_CUDA_COMPILER}" compiler)
  cmake_path(GET compiler PARENT_PATH bin)
  cmake_path(GET bin PARENT_PATH toolkit)
  set(torch "")
  if(FLASHVAR_TORCH_DIR)
    set(torch "${FLASHVAR_TORCH_DIR}=torch")
  endif()
  # The last one that fits is taken: the build may be inside of the sources.
  foreach(map IN ITEMS ${toolkit}=cuda ${home}=. ${CMAKE_SOURCE_DIR}=. ${CMAKE_BINARY_DIR}=build
                       ${FLASHVAR_GENERATED_DIR}=plan ${torch})
    set(handed_on "-ffile-prefix-map=${map}")
    if(map MATCHES " ")
      set(handed_on "\"${handed_on}\"")  # nvcc calls the host's compiler through a shell
    endif()
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${map}>"
      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${handed_on}>")
  endforeach()
endfunction()
