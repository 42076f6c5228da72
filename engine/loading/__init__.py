"""ROOM engine/loading"""
