"""Selection: finds the kernel that serves a request, with a reason for every other candidate."""
