// libnccl between processes of one host, through a file in /dev/shm. A collective runs when it is called, or when its
// group ends. Each rank has a slot of the file; large buffers go through it in pieces.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "emulator.h"

namespace {

constexpr size_t SLOT = 1 << 20;
constexpr size_t PIECE = 1 << 16;  // of point-to-point messages
constexpr int MAX_RANKS = 8;
constexpr int SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4;

// ncclDataType_t and ncclRedOp_t
enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum Operation { SUM, PRODUCT_OF_ALL, MAX, MIN, AVERAGE, SCALED_SUM };

struct Id {
  char path[128];
};

struct SharedFile {
  std::atomic<int> joined;
  std::atomic<int> arrived;
  std::atomic<unsigned> phase;
  std::atomic<unsigned long> sent[MAX_RANKS][MAX_RANKS];  // pieces from rank [i] to rank [j]
  std::atomic<unsigned long> received[MAX_RANKS][MAX_RANKS];
  char pieces[MAX_RANKS][MAX_RANKS][PIECE];
  char slots[MAX_RANKS][SLOT];
};

struct Communicator {
  SharedFile* file;
  int size;
  int rank;
  std::string path;
  int splits = 0;
};

struct Message {
  Communicator* communicator;
  bool is_send;
  char* data;
  size_t bytes;
  int peer;
  size_t done = 0;
};

thread_local int group_depth = 0;
thread_local std::vector<std::function<void()>> queued_collectives;
thread_local std::vector<Message> queued_messages;

size_t width(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type < 12 ? widths[type] : 1;
}

// EMU_NCCL_LIMIT: buffers above it are not moved, only met for.
bool too_large(size_t bytes) {
  static size_t limit = emu_setting("EMU_NCCL_LIMIT", 64 << 20);
  return bytes > limit;
}

void barrier(Communicator* communicator) {
  SharedFile* file = communicator->file;
  unsigned phase = file->phase.load();
  if (file->arrived.fetch_add(1) + 1 == communicator->size) {
    file->arrived = 0;
    file->phase.fetch_add(1);
    return;
  }
  while (file->phase.load() == phase) sched_yield();
}

// ---- reductions

float from_bfloat16(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
}

float from_float16(uint16_t value) {
  _Float16 half;
  memcpy(&half, &value, sizeof half);
  return static_cast<float>(half);
}

uint16_t to_float16(float value) {
  auto half = static_cast<_Float16>(value);
  uint16_t result;
  memcpy(&result, &half, sizeof result);
  return result;
}

template <class Number>
Number combine(Number a, Number b, int operation) {
  switch (operation) {
    case PRODUCT_OF_ALL:
      return a * b;
    case MAX:
      return a > b ? a : b;
    case MIN:
      return a < b ? a : b;
    default:
      return a + b;
  }
}

template <class Number>
void reduce_numbers(Communicator* communicator, char* output, size_t count, int operation) {
  auto* results = reinterpret_cast<Number*>(output);
  for (size_t i = 0; i < count; i++) {
    Number total = reinterpret_cast<Number*>(communicator->file->slots[0])[i];
    for (int rank = 1; rank < communicator->size; rank++)
      total = combine(total, reinterpret_cast<Number*>(communicator->file->slots[rank])[i], operation);
    if (operation == AVERAGE) total = static_cast<Number>(total / communicator->size);
    results[i] = total;
  }
}

void reduce_16_bit(Communicator* communicator, char* output, size_t count, int type, int operation) {
  auto read = type == FLOAT16 ? from_float16 : from_bfloat16;
  auto write = type == FLOAT16 ? to_float16 : to_bfloat16;
  auto* results = reinterpret_cast<uint16_t*>(output);
  for (size_t i = 0; i < count; i++) {
    float total = read(reinterpret_cast<uint16_t*>(communicator->file->slots[0])[i]);
    for (int rank = 1; rank < communicator->size; rank++)
      total = combine(total, read(reinterpret_cast<uint16_t*>(communicator->file->slots[rank])[i]), operation);
    if (operation == AVERAGE) total /= communicator->size;
    results[i] = write(total);
  }
}

// Reduce the first `count` numbers of all slots.
void reduce_slots(Communicator* communicator, char* output, size_t count, int type, int operation) {
  switch (type) {
    case INT8:
      return reduce_numbers<int8_t>(communicator, output, count, operation);
    case UINT8:
      return reduce_numbers<uint8_t>(communicator, output, count, operation);
    case INT32:
      return reduce_numbers<int32_t>(communicator, output, count, operation);
    case UINT32:
      return reduce_numbers<uint32_t>(communicator, output, count, operation);
    case INT64:
      return reduce_numbers<int64_t>(communicator, output, count, operation);
    case UINT64:
      return reduce_numbers<uint64_t>(communicator, output, count, operation);
    case FLOAT32:
      return reduce_numbers<float>(communicator, output, count, operation);
    case FLOAT64:
      return reduce_numbers<double>(communicator, output, count, operation);
    case FLOAT16:
    case BFLOAT16:
      return reduce_16_bit(communicator, output, count, type, operation);
  }
}

// ---- collectives and messages

int run(std::function<void()> collective) {
  emu_counts[COLLECTIVE]++;
  if (group_depth)
    queued_collectives.push_back(collective);
  else
    collective();
  return SUCCESS;
}

// Call `move(first, count)` for pieces of `count` numbers, where `moved` bytes decide whether anything is moved at all.
void in_pieces(Communicator* communicator, size_t count, size_t piece, size_t moved,
               const std::function<void(size_t, size_t)>& move) {
  if (too_large(moved)) return barrier(communicator);
  for (size_t first = 0; first < count; first += piece) move(first, count - first < piece ? count - first : piece);
}

char* slot(Communicator* communicator, int rank) { return communicator->file->slots[rank]; }

// Whether an earlier message of the same direction is still on its way: those between two ranks keep their order.
bool waits_for_earlier(const std::vector<Message>& messages, size_t index) {
  const Message& message = messages[index];
  for (size_t i = 0; i < index; i++) {
    const Message& other = messages[i];
    bool same_way =
        other.communicator == message.communicator && other.is_send == message.is_send && other.peer == message.peer;
    if (same_way && other.done < other.bytes) return true;
  }
  return false;
}

// Move the next piece of a message if the other side is ready.
bool move_piece(Message& message) {
  Communicator* communicator = message.communicator;
  int from = message.is_send ? communicator->rank : message.peer;
  int to = message.is_send ? message.peer : communicator->rank;
  auto& sent = communicator->file->sent[from][to];
  auto& received = communicator->file->received[from][to];
  char* piece = communicator->file->pieces[from][to];
  size_t left = message.bytes - message.done;
  size_t bytes = left < PIECE ? left : PIECE;
  bool is_empty = sent.load() == received.load();
  if (message.is_send != is_empty) return false;
  if (message.is_send) {
    memcpy(piece, message.data + message.done, bytes);
    sent++;
  } else {
    memcpy(message.data + message.done, piece, bytes);
    received++;
  }
  message.done += bytes;
  return true;
}

void run_messages() {
  std::vector<Message> messages;
  messages.swap(queued_messages);
  bool busy = true;
  while (busy) {
    busy = false;
    for (size_t i = 0; i < messages.size(); i++) {
      if (messages[i].done >= messages[i].bytes) continue;
      busy = true;
      if (waits_for_earlier(messages, i)) continue;
      if (!move_piece(messages[i])) sched_yield();
    }
  }
}

int add_message(const Message& message) {
  emu_counts[COLLECTIVE]++;
  queued_messages.push_back(message);
  if (!group_depth) run_messages();
  return SUCCESS;
}

// ---- communicators

int join(Communicator** result, int size, const std::string& path, int rank) {
  if (size > MAX_RANKS) return INVALID_ARGUMENT;
  int descriptor = open(path.c_str(), O_CREAT | O_RDWR, 0600);
  if (descriptor < 0 || ftruncate(descriptor, sizeof(SharedFile))) return SYSTEM_ERROR;
  void* memory = mmap(nullptr, sizeof(SharedFile), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (memory == MAP_FAILED) return SYSTEM_ERROR;
  auto* communicator = new Communicator{static_cast<SharedFile*>(memory), size, rank, path};
  communicator->file->joined++;
  while (communicator->file->joined.load() < size) usleep(200);
  barrier(communicator);
  if (rank == 0) unlink(path.c_str());
  *result = communicator;
  return SUCCESS;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
  *version = 22803;
  return SUCCESS;
}

EXPORT int ncclGetUniqueId(Id* id) {
  static int count;
  memset(id, 0, sizeof *id);
  snprintf(id->path, sizeof id->path, "/dev/shm/cuda-emulator-nccl-%d-%d-%ld", getpid(), count++,
           static_cast<long>(time(nullptr)));
  int descriptor = open(id->path, O_CREAT | O_RDWR, 0600);
  if (descriptor < 0 || ftruncate(descriptor, sizeof(SharedFile))) return SYSTEM_ERROR;
  close(descriptor);
  return SUCCESS;
}

EXPORT int ncclCommInitRank(Communicator** communicator, int size, Id id, int rank) {
  return join(communicator, size, id.path, rank);
}

EXPORT int ncclCommInitRankConfig(Communicator** communicator, int size, Id id, int rank, void*) {
  return join(communicator, size, id.path, rank);
}

EXPORT int ncclCommInitRankScalable(Communicator** communicator, int size, int rank, int, Id* id, void*) {
  return join(communicator, size, id->path, rank);
}

EXPORT int ncclCommSplit(Communicator* communicator, int color, int key, Communicator** result, void*) {
  const int mine[] = {color, key};
  memcpy(slot(communicator, communicator->rank), mine, sizeof mine);
  barrier(communicator);
  int size = 0, rank = 0;
  for (int other = 0; other < communicator->size; other++) {
    int theirs[2];
    memcpy(theirs, slot(communicator, other), sizeof theirs);
    if (theirs[0] != color) continue;
    size++;
    if (theirs[1] < key || (theirs[1] == key && other < communicator->rank)) rank++;
  }
  barrier(communicator);
  int split = communicator->splits++;
  *result = nullptr;
  if (color < 0) return SUCCESS;
  return join(result, size, communicator->path + "-" + std::to_string(split) + "-" + std::to_string(color), rank);
}

EXPORT int ncclCommGetAsyncError(Communicator*, int* error) {
  *error = SUCCESS;
  return SUCCESS;
}

EXPORT int ncclCommCount(Communicator* communicator, int* size) {
  *size = communicator->size;
  return SUCCESS;
}

EXPORT int ncclCommUserRank(Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return SUCCESS;
}

EXPORT int ncclCommCuDevice(Communicator*, int* device) {
  *device = emu_current_device();
  return SUCCESS;
}

EXPORT const char* ncclGetErrorString(int) { return "emulated"; }
EXPORT const char* ncclGetLastError(Communicator*) { return ""; }

EXPORT int ncclGroupStart() {
  group_depth++;
  return SUCCESS;
}

EXPORT int ncclGroupEnd() {
  if (--group_depth) return SUCCESS;
  std::vector<std::function<void()>> collectives;
  collectives.swap(queued_collectives);
  for (auto& collective : collectives) collective();
  run_messages();
  return SUCCESS;
}

EXPORT int ncclAllReduce(const char* input, char* output, size_t count, int type, int operation,
                         Communicator* communicator, void*) {
  return run([=] {
    size_t bytes = width(type);
    in_pieces(communicator, count, SLOT / bytes, count * bytes, [=](size_t first, size_t numbers) {
      memcpy(slot(communicator, communicator->rank), input + first * bytes, numbers * bytes);
      barrier(communicator);
      reduce_slots(communicator, output + first * bytes, numbers, type, operation);
      barrier(communicator);
    });
  });
}

EXPORT int ncclReduce(const char* input, char* output, size_t count, int type, int operation, int root,
                      Communicator* communicator, void*) {
  return run([=] {
    size_t bytes = width(type);
    in_pieces(communicator, count, SLOT / bytes, count * bytes, [=](size_t first, size_t numbers) {
      memcpy(slot(communicator, communicator->rank), input + first * bytes, numbers * bytes);
      barrier(communicator);
      if (communicator->rank == root) reduce_slots(communicator, output + first * bytes, numbers, type, operation);
      barrier(communicator);
    });
  });
}

EXPORT int ncclBroadcast(const char* input, char* output, size_t count, int type, int root, Communicator* communicator,
                         void*) {
  return run([=] {
    size_t bytes = width(type);
    in_pieces(communicator, count, SLOT / bytes, count * bytes, [=](size_t first, size_t numbers) {
      if (communicator->rank == root) memcpy(slot(communicator, 0), input + first * bytes, numbers * bytes);
      barrier(communicator);
      memcpy(output + first * bytes, slot(communicator, 0), numbers * bytes);
      barrier(communicator);
    });
  });
}

EXPORT int ncclBcast(char* data, size_t count, int type, int root, Communicator* communicator, void* stream) {
  return ncclBroadcast(data, data, count, type, root, communicator, stream);
}

EXPORT int ncclAllGather(const char* input, char* output, size_t count, int type, Communicator* communicator, void*) {
  return run([=] {
    size_t bytes = width(type);
    std::string copy(too_large(count * bytes) ? "" : std::string(input, count * bytes));  // may overlap the output
    in_pieces(communicator, count, SLOT / bytes, count * bytes, [&](size_t first, size_t numbers) {
      memcpy(slot(communicator, communicator->rank), copy.data() + first * bytes, numbers * bytes);
      barrier(communicator);
      for (int rank = 0; rank < communicator->size; rank++)
        memcpy(output + (rank * count + first) * bytes, slot(communicator, rank), numbers * bytes);
      barrier(communicator);
    });
  });
}

EXPORT int ncclReduceScatter(const char* input, char* output, size_t count, int type, int operation,
                             Communicator* communicator, void*) {
  return run([=] {
    size_t bytes = width(type);
    size_t total = count * bytes * communicator->size;
    std::string copy(too_large(total) ? "" : std::string(input, total));
    for (int part = 0; part < communicator->size; part++) {
      in_pieces(communicator, count, SLOT / bytes, total, [&](size_t first, size_t numbers) {
        memcpy(slot(communicator, communicator->rank), copy.data() + (part * count + first) * bytes, numbers * bytes);
        barrier(communicator);
        if (part == communicator->rank) reduce_slots(communicator, output + first * bytes, numbers, type, operation);
        barrier(communicator);
      });
    }
  });
}

EXPORT int ncclAlltoAll(const char* input, char* output, size_t count, int type, Communicator* communicator, void*) {
  return run([=] {
    size_t bytes = width(type);
    size_t total = count * bytes * communicator->size;
    std::string copy(too_large(total) ? "" : std::string(input, total));
    in_pieces(communicator, count, SLOT / bytes / communicator->size, total, [&](size_t first, size_t numbers) {
      for (int to = 0; to < communicator->size; to++)
        memcpy(slot(communicator, communicator->rank) + to * numbers * bytes,
               copy.data() + (to * count + first) * bytes, numbers * bytes);
      barrier(communicator);
      for (int from = 0; from < communicator->size; from++)
        memcpy(output + (from * count + first) * bytes, slot(communicator, from) + communicator->rank * numbers * bytes,
               numbers * bytes);
      barrier(communicator);
    });
  });
}

EXPORT int ncclSend(char* data, size_t count, int type, int peer, Communicator* communicator, void*) {
  return add_message({communicator, true, data, count * width(type), peer});
}

EXPORT int ncclRecv(char* data, size_t count, int type, int peer, Communicator* communicator, void*) {
  return add_message({communicator, false, data, count * width(type), peer});
}

EXPORT int ncclRedOpCreatePreMulSum(int* operation, void*, int, int, Communicator*) {
  *operation = SCALED_SUM;  // the factor is left out
  return SUCCESS;
}

EXPORT int ncclCommRegister(Communicator*, void*, size_t, void** handle) {
  *handle = reinterpret_cast<void*>(1);
  return SUCCESS;
}

EXPORT int ncclMemAlloc(void** pointer, size_t bytes) {
  *pointer = calloc(1, bytes);
  return SUCCESS;
}

EXPORT int ncclMemFree(void* pointer) {
  free(pointer);
  return SUCCESS;
}
