# fp4bf16/_ffi.py: the cffi out-of-line ABI module, from the same header that nvcc compiles. Pure Python, so
# it is made with or without a CUDA compiler.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)

file(GLOB FP4BF16_CUDA_SOURCES CONFIGURE_DEPENDS
     "${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/*.h" "${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/*.cuh"
     "${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/*.cu")
set(FP4BF16_FFI "${CMAKE_CURRENT_BINARY_DIR}/_ffi.py")
set(FP4BF16_BUILD_INFO "${CMAKE_CURRENT_BINARY_DIR}/generated/fp4bf16_build_info.h")
add_custom_command(
  OUTPUT "${FP4BF16_FFI}" "${FP4BF16_BUILD_INFO}"
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/bindings/build_ffi.py"
          --version "${FP4BF16_VERSION}" --module "${FP4BF16_FFI}" --build-info "${FP4BF16_BUILD_INFO}"
  DEPENDS ${FP4BF16_CUDA_SOURCES} "${CMAKE_CURRENT_SOURCE_DIR}/bindings/build_ffi.py"
  COMMENT "Generating the cffi module from src/cuda/fp4bf16.h"
  VERBATIM)
add_custom_target(fp4bf16_ffi ALL DEPENDS "${FP4BF16_FFI}" "${FP4BF16_BUILD_INFO}")
install(FILES "${FP4BF16_FFI}" DESTINATION fp4bf16)
