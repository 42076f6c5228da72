"""ROOM engine/serving"""
