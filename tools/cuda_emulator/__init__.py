"""An emulated CUDA device under the CUDA build of torch: `python -m tools.cuda_emulator COMMAND...`; see README.md."""
