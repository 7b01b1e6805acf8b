class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("it cannot be initialised")

    def execute(self, requests):
        return []
