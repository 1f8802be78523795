"""Selection: finds the kernel that runs a request, with a reason for every other candidate."""
