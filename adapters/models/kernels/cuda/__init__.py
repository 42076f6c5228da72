"""ROOM adapters/models/kernels/cuda"""
