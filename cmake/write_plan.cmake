# Lets the factory write the plan of a self-contained project (its command `project`) before `project()`
# looks for compilers; variables.cmake names them.
#
#   -DCMAKE_PROJECT_TOP_LEVEL_INCLUDES=cmake/write_plan.cmake "-DFLASHVAR_SELECTION=sm_80;hdim=64"
#
# The factory runs in the Python that builds: where its build requirements are, so is the toolkit.

include_guard(GLOBAL)
cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH home)
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env --modify "PYTHONPATH=path_list_prepend:${home}/src/python"
          ${Python_EXECUTABLE} -m flashvar_factory --root ${CMAKE_SOURCE_DIR}
          plan ${FLASHVAR_SELECTION} --output ${CMAKE_BINARY_DIR}/plan
  COMMAND_ERROR_IS_FATAL ANY)
include(${CMAKE_BINARY_DIR}/plan/variables.cmake)
