"""Realistic faults: ``(file, text that is there once, what replaces it, arguments of pytest)``.

A module for each package, or for several: the faults of its files.
"""

from table import attention, data, kernels, linear, models, others, plan, ring, training

MUTANTS = [
    *attention.MUTANTS,
    *ring.MUTANTS,
    *kernels.MUTANTS,
    *linear.MUTANTS,
    *models.MUTANTS,
    *training.MUTANTS,
    *data.MUTANTS,
    *plan.MUTANTS,
    *others.MUTANTS,
]
