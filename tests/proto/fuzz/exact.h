#pragma once

/* Whether kernels get memory of their own; see exact.c. */
extern int exact_memory;
