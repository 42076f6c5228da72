"""ROOM adapters/models/kernels/proof"""
