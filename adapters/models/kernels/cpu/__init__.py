"""ROOM adapters/models/kernels/cpu"""
