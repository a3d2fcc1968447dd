// Threads that share out the units of one job after another, phase by phase.
//
// A phase is a number of units that are independent of each other; the next one begins when all are done.
// Units are taken one at a time, so that a core that is slower, or that someone else is using, takes fewer
// of them, and a helper that has taken none (asleep, or waiting for a core) is not waited for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace specctl {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct alignas(64) Phase {
    std::atomic<int64_t> next{0}, done{0};
};

// One thread's way through a job: where it is, and memory of its own that lasts.
class Worker {
  public:
    explicit Worker(std::vector<float> *memory) : memory_(memory) {}

    void begin(Phase *phases) { phase_ = phases; }

    // Take units until none is left, then wait for those that others took. `prepare` runs on each thread that takes
    // any, once, before its first.
    template <class Prepare, class Unit> void share(int64_t units, Prepare prepare, Unit unit) {
        Phase &phase = *phase_++;
        bool prepared = false;
        for (int64_t taken; (taken = phase.next.fetch_add(1, std::memory_order_relaxed)) < units;) {
            if (!prepared) prepare();
            prepared = true;
            unit(taken);
            phase.done.fetch_add(1, std::memory_order_release);
        }
        for (int spins = 0; phase.done.load(std::memory_order_acquire) < units; ++spins) {
            if (spins < 4000) pause();
            else std::this_thread::yield();
        }
    }

    // At least `count` floats, valid until more of the same part are asked for. part: 0 or 1, apart from each other.
    float *memory(int part, size_t count) {
        std::vector<float> &part_memory = memory_[part];
        if (part_memory.size() < count) part_memory.resize(count);
        return part_memory.data();
    }

  private:
    std::vector<float> *memory_;
    Phase *phase_ = nullptr;
};

class Pool {
  public:
    // Run job(worker) on this thread and on as many helpers as come, all through the same phases in the same order.
    template <class Job> void run(int threads, int num_phases, Job job) {
        if (num_phases > num_phases_) {
            phases_ = std::make_unique<Phase[]>(num_phases);
            num_phases_ = num_phases;
        }
        for (int i = 0; i < num_phases; ++i) {
            phases_[i].next.store(0, std::memory_order_relaxed);
            phases_[i].done.store(0, std::memory_order_relaxed);
        }
        Worker self(own_memory_);
        self.begin(phases_.get());
        if (threads > 1) {
            while (num_helpers_ < threads - 1) {
                try {
                    std::thread(&Pool::help, this, num_helpers_).detach();
                } catch (const std::system_error &) {
                    break;  // no more threads to be had: those that there are will do
                }
                ++num_helpers_;
            }
            context_ = &job;
            call_ = [](void *context, Worker &worker) { (*static_cast<Job *>(context))(worker); };
            wanted_ = threads - 1;
            open_.store(++jobs_);
            if (asleep_.load() > 0) {
                std::lock_guard<std::mutex> hold(mutex_);
                wake_.notify_all();
            }
        }
        job(self);
        if (threads > 1) {
            open_.store(0);
            while (inside_.load() > 0) pause();
        }
    }

  private:
    static constexpr auto kAwake = std::chrono::microseconds(1000);  // longer than sampling takes between passes

    void help(int index) {
        std::vector<float> memory[2];
        Worker worker(memory);
        int64_t last = 0;
        for (;;) {
            wait_for_other_than(last);
            // Entered before it is closed, or not at all: a closed job's data may be gone.
            inside_.fetch_add(1);
            int64_t job = open_.load();
            if (job != 0 && job != last && index < wanted_) {
                worker.begin(phases_.get());
                call_(context_, worker);
            }
            inside_.fetch_sub(1);
            if (job != 0) last = job;
        }
    }

    void wait_for_other_than(int64_t last) {
        auto is_new = [&] {
            int64_t job = open_.load();
            return job != 0 && job != last;
        };
        auto until = std::chrono::steady_clock::now() + kAwake;
        do {
            for (int spins = 0; spins < 64; ++spins) {
                if (is_new()) return;
                pause();
            }
        } while (std::chrono::steady_clock::now() < until);
        std::unique_lock<std::mutex> hold(mutex_);
        asleep_.fetch_add(1);
        wake_.wait(hold, is_new);
        asleep_.fetch_sub(1);
    }

    std::unique_ptr<Phase[]> phases_;
    int num_phases_ = 0, num_helpers_ = 0;
    std::vector<float> own_memory_[2];
    void *context_ = nullptr;
    void (*call_)(void *, Worker &) = nullptr;
    int wanted_ = 0;
    int64_t jobs_ = 0;
    std::atomic<int64_t> open_{0};
    std::atomic<int> inside_{0}, asleep_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace specctl
