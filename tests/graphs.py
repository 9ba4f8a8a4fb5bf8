"""What a launch puts into a CUDA graph, replayed by the tests that change what it reads in between."""

from __future__ import annotations


class captured:
    """What `launch(stream)` launches as a graph; a function that replays it and waits."""

    def __init__(self, gpu, launch):
        self.gpu, rt, check = gpu, gpu.rt, gpu.check
        self.stream = check(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
        mode = rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        check(rt.cudaStreamBeginCapture(self.stream, mode))
        launch(int(self.stream))
        self.run = check(rt.cudaGraphInstantiate(check(rt.cudaStreamEndCapture(self.stream)), 0))

    def __enter__(self):
        return self.replay

    def replay(self) -> None:
        self.gpu.check(self.gpu.rt.cudaDeviceSynchronize())  # what was copied and set is there
        self.gpu.check(self.gpu.rt.cudaGraphLaunch(self.run, self.stream))
        self.gpu.check(self.gpu.rt.cudaStreamSynchronize(self.stream))

    def __exit__(self, *error) -> None:
        self.gpu.check(self.gpu.rt.cudaGraphExecDestroy(self.run))
        self.gpu.check(self.gpu.rt.cudaStreamDestroy(self.stream))
