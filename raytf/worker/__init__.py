"""The TensorFlow side: everything that runs inside a worker process. The only folder that imports
TensorFlow.
"""
