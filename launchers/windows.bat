@echo off
rem DeepSpeed's launcher, NCCL and the signals dstrain stops by do not exist on Windows itself.
rem What works is Linux inside it (WSL 2), where NVIDIA GPUs are visible as well.
echo dstrain runs on Windows inside WSL 2:
echo     wsl --install -d Ubuntu
echo     wsl
echo     pip install dstrain
echo     dstrain train demo-rm
echo Keep recipe, data and runs on the Linux side (in ~), not under /mnt/c, which is slow.
exit /b 2
