package solaris.peers;

import java.util.Arrays;

/**
 * What a user's chunks say about the ads of one impression: direct embeddings, means by topic, the rolling mean of all
 * pairs, the newest user state. Buffers are reused: one instance for each stream thread.
 */
final class Lookup {
    private final Config config;
    private final int dim;
    private int[] records = new int[16];
    private long[] times = new long[16];

    private long[] pairKeys = new long[512];
    private int[] pairRows = new int[512];
    private int[] pairChunk = new int[256];
    private float[] pairVectors;
    private int pairs;

    private int[] topicKeys = new int[128];
    private int[] topicRows = new int[128];
    private int topics;
    private double[] topicSums;
    private int[] topicCounts = new int[64];
    private long[] topicTimes = new long[64];

    private final double[] sum;
    final float[] aggregate;
    int aggregateCount;
    long aggregateTs;
    final float[] state;
    long stateTs;

    Lookup(Config config) {
        this.config = config;
        dim = config.dim();
        pairVectors = new float[256 * dim];
        topicSums = new double[64 * dim];
        sum = new double[dim];
        aggregate = new float[dim];
        state = new float[config.stateDim()];
    }

    /** Reads all that is visible at {@code now}; {@code chunks} may be null. */
    void read(byte[] chunks, long now) {
        pairs = 0;
        topics = 0;
        aggregateCount = 0;
        aggregateTs = -1;
        stateTs = -1;
        Arrays.fill(pairRows, -1);
        Arrays.fill(topicRows, -1);
        Arrays.fill(sum, 0);
        if (chunks == null) {
            return;
        }
        int n = newestFirst(chunks, now);
        for (int c = 0; c < n; c++) {
            int r = records[c];
            long ts = times[c];
            if (stateTs < 0 && Chunks.u16(chunks, r + 46) > 0 && now < ts + config.ttlMs()) {
                readState(chunks, r, ts);
            }
            readPairs(chunks, r, c, now < ts + config.windowMs());
        }
        for (int j = 0; j < dim; j++) {
            aggregate[j] = aggregateCount > 0 ? (float) (sum[j] / aggregateCount) : 0;
        }
    }

    /** The pair's embedding into {@code out}; its event time, or -1 and zeros. */
    long direct(long item, long now, float[] out, int at) {
        int row = pairRow(item);
        if (row < 0 || now >= times[pairChunk[row]] + config.ttlMs()) {
            Arrays.fill(out, at, at + dim, 0);
            return -1;
        }
        System.arraycopy(pairVectors, row * dim, out, at, dim);
        return times[pairChunk[row]];
    }

    /** Row of a topic's mean, or -1. */
    int topic(int topic) {
        int mask = topicKeys.length - 1;
        for (int slot = mix(topic) & mask; topicRows[slot] >= 0; slot = slot + 1 & mask) {
            if (topicKeys[slot] == topic) {
                return topicRows[slot];
            }
        }
        return -1;
    }

    void topicMean(int row, float[] out, int at) {
        double count = topicCounts[row];
        for (int j = 0; j < dim; j++) {
            out[at + j] = (float) (topicSums[row * dim + j] / count);
        }
    }

    int topicCount(int row) {
        return topicCounts[row];
    }

    long topicTs(int row) {
        return topicTimes[row];
    }

    /** Fills records and times with the chunks of this model that are visible at {@code now}; how many there are. */
    private int newestFirst(byte[] chunks, long now) {
        int n = 0;
        for (int r = Chunks.first(); r < chunks.length; r = Chunks.next(chunks, r)) {
            long ts = Chunks.i64(chunks, r + 16);
            if (ts > now || Chunks.i64(chunks, r + 24) != config.fmHash() || !fits(chunks, r)) {
                continue;
            }
            if (n == records.length) {
                records = Arrays.copyOf(records, 2 * n);
                times = Arrays.copyOf(times, 2 * n);
            }
            int at = n++;
            for (; at > 0 && times[at - 1] <= ts; at--) { // of equal times the later arrival comes first
                records[at] = records[at - 1];
                times[at] = times[at - 1];
            }
            records[at] = r;
            times[at] = ts;
        }
        return n;
    }

    private boolean fits(byte[] chunks, int r) {
        int n = Chunks.i32(chunks, r + 40), s = Chunks.u16(chunks, r + 46), p = Chunks.u16(chunks, r + 48);
        return (n == 0 || Chunks.u16(chunks, r + 44) == dim) && (s == 0 || s == config.stateDim())
                && (p == 0 || p == config.profile());
    }

    private void readState(byte[] chunks, int r, long ts) {
        int n = Chunks.i32(chunks, r + 40);
        int at = r + Chunks.HEADER + 12 * n + (chunks[r + 5] == 1 ? 4 * n + n * dim : 2 * n * dim);
        for (int j = 0; j < state.length; j++) {
            state[j] = Half.of(Chunks.i16(chunks, at + 2 * j));
        }
        stateTs = ts;
    }

    private void readPairs(byte[] chunks, int r, int chunk, boolean lasting) {
        int n = Chunks.i32(chunks, r + 40);
        boolean int8 = chunks[r + 5] == 1;
        int itemsAt = r + Chunks.HEADER;
        int topicsAt = itemsAt + 8 * n;
        int scalesAt = topicsAt + 4 * n;
        int vectorsAt = int8 ? scalesAt + 4 * n : scalesAt;
        for (int i = 0; i < n; i++) {
            int row = add(Chunks.i64(chunks, itemsAt + 8 * i));
            if (row < 0) {
                continue; // a newer chunk has this pair
            }
            pairChunk[row] = chunk;
            int v = row * dim;
            if (int8) {
                float scale = Float.intBitsToFloat(Chunks.i32(chunks, scalesAt + 4 * i));
                for (int j = 0; j < dim; j++) {
                    pairVectors[v + j] = scale * chunks[vectorsAt + i * dim + j];
                }
            } else {
                for (int j = 0; j < dim; j++) {
                    pairVectors[v + j] = Half.of(Chunks.i16(chunks, vectorsAt + 2 * (i * dim + j)));
                }
            }
            if (lasting) {
                int t = topicRow(Chunks.i32(chunks, topicsAt + 4 * i));
                for (int j = 0; j < dim; j++) {
                    float x = pairVectors[v + j];
                    sum[j] += x;
                    topicSums[t * dim + j] += x;
                }
                topicCounts[t]++;
                topicTimes[t] = Math.max(topicTimes[t], times[chunk]);
                aggregateCount++;
                aggregateTs = Math.max(aggregateTs, times[chunk]);
            }
        }
    }

    /** A new row for the item, or -1 when it has one. */
    private int add(long item) {
        if (2 * pairs >= pairKeys.length) {
            growPairs();
        }
        int mask = pairKeys.length - 1;
        int slot = (int) item & mask;
        for (; pairRows[slot] >= 0; slot = slot + 1 & mask) {
            if (pairKeys[slot] == item) {
                return -1;
            }
        }
        pairKeys[slot] = item;
        pairRows[slot] = pairs;
        return pairs++;
    }

    private int pairRow(long item) {
        int mask = pairKeys.length - 1;
        for (int slot = (int) item & mask; pairRows[slot] >= 0; slot = slot + 1 & mask) {
            if (pairKeys[slot] == item) {
                return pairRows[slot];
            }
        }
        return -1;
    }

    private void growPairs() {
        long[] keys = pairKeys;
        int[] rows = pairRows;
        pairKeys = new long[2 * keys.length];
        pairRows = new int[2 * keys.length];
        Arrays.fill(pairRows, -1);
        int mask = pairKeys.length - 1;
        for (int k = 0; k < keys.length; k++) {
            if (rows[k] >= 0) {
                int slot = (int) keys[k] & mask;
                while (pairRows[slot] >= 0) {
                    slot = slot + 1 & mask;
                }
                pairKeys[slot] = keys[k];
                pairRows[slot] = rows[k];
            }
        }
        pairChunk = Arrays.copyOf(pairChunk, keys.length);
        pairVectors = Arrays.copyOf(pairVectors, keys.length * dim);
    }

    private int topicRow(int topic) {
        int mask = topicKeys.length - 1;
        int slot = mix(topic) & mask;
        for (; topicRows[slot] >= 0; slot = slot + 1 & mask) {
            if (topicKeys[slot] == topic) {
                return topicRows[slot];
            }
        }
        if (2 * topics >= topicKeys.length) {
            growTopics();
            return topicRow(topic);
        }
        int row = topics++;
        topicKeys[slot] = topic;
        topicRows[slot] = row;
        topicCounts[row] = 0;
        topicTimes[row] = -1;
        Arrays.fill(topicSums, row * dim, (row + 1) * dim, 0);
        return row;
    }

    private void growTopics() {
        int[] keys = topicKeys;
        int[] rows = topicRows;
        topicKeys = new int[2 * keys.length];
        topicRows = new int[2 * keys.length];
        Arrays.fill(topicRows, -1);
        int mask = topicKeys.length - 1;
        for (int k = 0; k < keys.length; k++) {
            if (rows[k] >= 0) {
                int slot = mix(keys[k]) & mask;
                while (topicRows[slot] >= 0) {
                    slot = slot + 1 & mask;
                }
                topicKeys[slot] = keys[k];
                topicRows[slot] = rows[k];
            }
        }
        topicCounts = Arrays.copyOf(topicCounts, keys.length);
        topicTimes = Arrays.copyOf(topicTimes, keys.length);
        topicSums = Arrays.copyOf(topicSums, keys.length * dim);
    }

    private static int mix(int topic) {
        return topic * 0x9E3779B1 >>> 7;
    }
}
