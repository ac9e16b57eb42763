"""Gandiva: time slices, packing, migration, growing, by looking at what helps (Xiao et al., OSDI 2018)."""
