"""ROOM adapters/models/kernels/reference"""
