# fp4bf16_find_nvcc(<path> <problem>): an nvcc that can build and link a shared library for the architectures
# asked for, or why there is none. An nvcc whose host compiler is missing counts as none.
function(fp4bf16_find_nvcc OUT PROBLEM)
  set(${OUT} "" PARENT_SCOPE)
  if(CMAKE_CUDA_COMPILER)
    set(NVCC "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX} AND NOT "$ENV{CUDACXX}" STREQUAL "")
    separate_arguments(NVCC UNIX_COMMAND "$ENV{CUDACXX}")
    list(GET NVCC 0 NVCC)
  else()
    find_program(FP4BF16_NVCC_PROGRAM nvcc
      PATHS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin)
    set(NVCC "${FP4BF16_NVCC_PROGRAM}")
  endif()
  if(NOT NVCC)
    set(${PROBLEM} "no nvcc was found" PARENT_SCOPE)
    return()
  endif()

  set(PROBE "${CMAKE_BINARY_DIR}/nvcc_probe")
  file(WRITE "${PROBE}/probe.cu" "
__global__ void k(int* p) { *p = 1; }
extern \"C\" int f(int* p) { k<<<1, 1>>>(p); return 0; }
")
  list(GET FP4BF16_CUDA_ARCHS 0 ARCH)
  string(REGEX REPLACE "-.*" "" ARCH "${ARCH}")
  set(HOST "")
  if(CMAKE_CUDA_HOST_COMPILER)
    set(HOST -ccbin "${CMAKE_CUDA_HOST_COMPILER}")
  elseif(DEFINED ENV{CUDAHOSTCXX})
    set(HOST -ccbin "$ENV{CUDAHOSTCXX}")
  endif()
  execute_process(
    COMMAND "${NVCC}" ${HOST} -shared -cudart static -Xcompiler -fPIC
            -gencode "arch=compute_${ARCH},code=sm_${ARCH}" -o "${PROBE}/probe.so" "${PROBE}/probe.cu"
    RESULT_VARIABLE FAILED OUTPUT_VARIABLE LOG ERROR_VARIABLE LOG)
  if(NOT FAILED STREQUAL "0")
    string(STRIP "${LOG}" LOG)
    string(REGEX REPLACE "[\r\n].*" "" LOG "${LOG}")
    set(${PROBLEM} "${NVCC} cannot build a small library for sm_${ARCH}: ${LOG} [${FAILED}]" PARENT_SCOPE)
    return()
  endif()
  set(${OUT} "${NVCC}" PARENT_SCOPE)
endfunction()
