// Threads that share out the units of one job after another, phase by phase.
//
// A phase is a number of units that are independent of each other; the next one begins when all are done. Units are
// taken one at a time, so that a core that is slower, or that someone else is using, takes fewer of them.
//
// Nothing waits for a helper but for units that it holds. A job is words that each helper copies, and what it counts in
// is marked with the job's number, so a helper that was scheduled away and comes back when its job is long over finds
// nothing to take and touches nothing. Where the caller has waited much longer for a unit than one takes, somebody else
// is on the helper's core: the helpers then rest for many times as long as that cost, and come back.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

namespace specctl {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;

constexpr int kUnitBits = 24;  // of `next`: the next unit; above them the number of the job

struct alignas(64) Phase {
    std::atomic<int64_t> next{0}, done{0};
};

// One thread's way through a job: where it is, and memory of its own that lasts. The caller's own worker also notes the
// longest that it waited in vain.
class Worker {
  public:
    explicit Worker(std::vector<float> *memory) : memory_(memory) {}

    void begin(Phase *phases, int64_t job, bool is_helper) {
        phase_ = phases, job_ = job, is_helper_ = is_helper, is_over_ = false;
        stalled_ = Clock::duration::zero();
    }

    // Whether the job has gone on without this thread, which then has nothing more to do in it.
    bool is_over() const { return is_over_; }

    Clock::duration stalled() const { return stalled_; }

    // Take units until none is left, then wait for those that others took. `prepare` runs on each thread that gets a
    // unit, before its first.
    template <class Prepare, class Unit> void share(int64_t units, Prepare prepare, Unit unit) {
        if (is_over_) return;
        Phase &phase = *phase_++;
        const auto began = Clock::now();
        int count = 0;
        for (int64_t taken; (taken = take(phase, units)) >= 0; ++count) {
            if (count == 0) prepare();
            unit(taken);
            phase.done.fetch_add(1, std::memory_order_release);
        }
        wait(phase, units, began, count);
    }

    // At least `count` floats; what they hold is lost when more are asked for. part: 0 or 1, apart from each other.
    float *memory(int part, size_t count) {
        std::vector<float> &part_memory = memory_[part];
        if (part_memory.size() < count) part_memory.resize(count);
        return part_memory.data();
    }

  private:
    static constexpr int kSpins = 1000;  // tens of microseconds: most units are shorter
    static constexpr auto kStall = std::chrono::microseconds(100), kUnknown = std::chrono::microseconds(2000);
    static constexpr int kUnits = 4;  // who waits longer than this many units take waits for a thread that is not running
    static constexpr auto kNap = std::chrono::microseconds(50);  // leaves this core to whoever waits for one

    // The next unit of a phase, -1 where none is left or the job is over.
    int64_t take(Phase &phase, int64_t units) {
        int64_t next = phase.next.load(std::memory_order_relaxed);
        for (;;) {
            if (next >> kUnitBits != job_) {
                is_over_ = true;
                return -1;
            }
            const int64_t unit = next & ((int64_t{1} << kUnitBits) - 1);
            if (unit >= units) return -1;
            if (phase.next.compare_exchange_weak(next, next + 1, std::memory_order_relaxed)) return unit;
        }
    }

    // began: when this thread came to the phase; count: the units that it has done there since.
    void wait(Phase &phase, int64_t units, Clock::time_point began, int count) {
        const auto is_done = [&] {
            if (is_over_ || phase.done.load(std::memory_order_acquire) >= units) return true;
            if (!is_helper_ || phase.next.load(std::memory_order_relaxed) >> kUnitBits == job_) return false;
            return is_over_ = true;
        };
        for (int spins = 0; spins < kSpins; ++spins) {
            if (is_done()) return;
            pause();
        }
        const auto now = Clock::now();
        const auto patience = count == 0 ? Clock::duration(kUnknown) : (now - began) / count * kUnits + kStall;
        while (!is_done()) {
            if (Clock::now() - now < patience) std::this_thread::yield();
            else std::this_thread::sleep_for(kNap);
        }
        const auto waited = Clock::now() - now;
        if (waited > patience) stalled_ = std::max(stalled_, waited);
    }

    std::vector<float> *memory_;
    Phase *phase_ = nullptr;
    int64_t job_ = 0;
    bool is_helper_ = false, is_over_ = false;
    Clock::duration stalled_{};
};

class Pool {
  public:
    // Run job(worker) on this thread and on as many helpers as come, all through the same phases in the same order.
    // What a job reads between its phases it holds itself: helpers run copies of it.
    template <class Job> void run(int threads, int num_phases, const Job &job) {
        static_assert(std::is_trivially_copyable<Job>::value && sizeof(Job) <= sizeof(int64_t) * kWords, "copied as words");
        if (num_phases > num_phases_) {
            phases_.push_back(std::make_unique<Phase[]>(num_phases));  // a helper may still look at the old ones
            num_phases_ = num_phases;
        }
        Phase *phases = phases_.back().get();
        const int64_t number = ++jobs_;
        for (int i = 0; i < num_phases; ++i) {
            phases[i].done.store(0, std::memory_order_relaxed);
            phases[i].next.store(number << kUnitBits, std::memory_order_release);
        }
        Worker self(own_memory_);
        self.begin(phases, number, false);
        const bool has_help = threads > 1 && (resting_until_ == Clock::time_point{} || Clock::now() >= resting_until_);
        if (has_help) {
            hire(threads - 1);
            offer(phases, threads - 1, job, number);
        }
        job(self);
        if (has_help) {
            open_.store(0);
            rest_after(self.stalled());
        }
    }

    // Wait until no helper is in a job, however old: afterwards what the jobs read may be freed.
    void settle() {
        while (inside_.load() > 0) std::this_thread::yield();
    }

  private:
    static constexpr int kWords = 48;
    static constexpr auto kAwake = std::chrono::microseconds(1000);  // longer than sampling takes between passes
    static constexpr int kRest = 25;  // times as long as a stall: what stalls cost stays a few percent
    static constexpr auto kLongestRest = std::chrono::seconds(1);

    using Call = void (*)(const int64_t *, Worker &);

    void hire(int count) {
        while (num_helpers_ < count) {
            try {
                std::thread(&Pool::help, this, num_helpers_).detach();
            } catch (const std::system_error &) {
                return;  // no more threads to be had: those that there are will do
            }
            ++num_helpers_;
        }
    }

    template <class Job> void offer(Phase *phases, int wanted, const Job &job, int64_t number) {
        int64_t words[kWords] = {};
        std::memcpy(words, &job, sizeof job);
        std::atomic_thread_fence(std::memory_order_release);  // open_ is 0: whoever copies now looks again and sees it
        for (int i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
        phases_now_.store(phases, std::memory_order_relaxed);
        wanted_.store(wanted, std::memory_order_relaxed);
        call_.store([](const int64_t *copy, Worker &worker) {
            Job own = *reinterpret_cast<const Job *>(copy);
            own(worker);
        }, std::memory_order_relaxed);
        open_.store(number);
        if (asleep_.load() > 0) {
            std::lock_guard<std::mutex> hold(mutex_);
            wake_.notify_all();
        }
    }

    // Twice as long each time that helpers stall again soon after they came back.
    void rest_after(Clock::duration stalled) {
        if (stalled == Clock::duration::zero()) return;
        const auto now = Clock::now();
        const bool again = now - resting_until_ < rest_;
        rest_ = std::min<Clock::duration>(again ? std::max<Clock::duration>(2 * rest_, stalled * kRest) : stalled * kRest,
                                          kLongestRest);
        resting_until_ = now + rest_;
    }

    void help(int index) {
        std::vector<float> memory[2];
        Worker worker(memory);
        int64_t last = 0;
        alignas(64) int64_t copy[kWords];
        for (;;) {
            wait_for_other_than(last);
            inside_.fetch_add(1);
            const int64_t job = open_.load();
            for (int i = 0; i < kWords; ++i) copy[i] = words_[i].load(std::memory_order_relaxed);
            Phase *phases = phases_now_.load(std::memory_order_relaxed);
            const Call call = call_.load(std::memory_order_relaxed);
            const bool is_wanted = index < wanted_.load(std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_acquire);
            if (job != 0 && job != last && is_wanted && open_.load() == job) {  // all of it is of this job
                worker.begin(phases, job, true);
                call(copy, worker);
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
        auto until = Clock::now() + kAwake;
        do {
            for (int spins = 0; spins < 64; ++spins) {
                if (is_new()) return;
                pause();
            }
        } while (Clock::now() < until);
        std::unique_lock<std::mutex> hold(mutex_);
        asleep_.fetch_add(1);
        wake_.wait(hold, is_new);
        asleep_.fetch_sub(1);
    }

    std::vector<std::unique_ptr<Phase[]>> phases_;
    int num_phases_ = 0, num_helpers_ = 0;
    std::vector<float> own_memory_[2];
    int64_t jobs_ = 0;
    Clock::time_point resting_until_{};
    Clock::duration rest_{};  // the last one
    std::atomic<int64_t> words_[kWords] = {};
    std::atomic<Phase *> phases_now_{nullptr};
    std::atomic<Call> call_{nullptr};
    std::atomic<int> wanted_{0}, inside_{0}, asleep_{0};
    std::atomic<int64_t> open_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace specctl
