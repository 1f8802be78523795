"""Facts of the machine: devices, driver, compilers, and the CUDA version torch was built for."""
