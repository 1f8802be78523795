"""What the machine is: devices, driver, compilers and what torch was built for."""
