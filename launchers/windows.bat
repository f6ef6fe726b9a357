@echo off
rem Windows lacks what training needs: DeepSpeed's launcher, NCCL, and the signals that stop dstrain.
rem Linux inside Windows (WSL 2) works. NVIDIA GPUs are available there through the Windows driver.
echo dstrain does not run on Windows itself. It runs inside WSL 2. Run once, in this window:
echo     wsl --install -d Ubuntu-24.04
echo then in Ubuntu's window, in this project's folder, copied under ~ (not under /mnt/c, which is slow):
echo     sudo apt-get install python3-venv python3-dev g++ make
echo     make demo
echo     source .venv/bin/activate
echo     dstrain train demo-rm
exit /b 2
