"""Pallas Mosaic GPU kernels: code shared by the families, and one package per family."""
