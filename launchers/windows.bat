@echo off
rem Windows itself lacks what training stands on: DeepSpeed's launcher, NCCL, and the signals dstrain stops by.
rem What works is Linux inside Windows (WSL 2). NVIDIA GPUs are seen there through the driver of Windows.
echo dstrain does not run on Windows itself. It runs inside WSL 2; once, in this window:
echo     wsl --install -d Ubuntu-24.04
echo then in Ubuntu's window, in a folder under ~ (not under /mnt/c, which is slow), with this project's folder in it:
echo     sudo apt-get install python3-venv python3-dev g++ make
echo     make demo
echo     source .venv/bin/activate
echo     dstrain train demo-rm
exit /b 2
