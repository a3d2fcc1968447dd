"""A pass of a Llama decoder as one C++ function for CPUs, built on the machine that runs it."""
