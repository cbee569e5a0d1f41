package solaris.peers;

import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.nio.ByteOrder;
import java.util.Arrays;

/**
 * A user's embedding chunks as one value of the state store: each with its length (int32) before it, oldest arrival
 * first. The chunks are the packed records of the {@code embeddings} topic as they came (topics/packed.py, kind E).
 */
final class Chunks {
    static final int HEADER = 56;
    private static final int PREFIX = 4;
    private static final VarHandle LONG = MethodHandles.byteArrayViewVarHandle(long[].class, ByteOrder.LITTLE_ENDIAN);
    private static final VarHandle INT = MethodHandles.byteArrayViewVarHandle(int[].class, ByteOrder.LITTLE_ENDIAN);
    private static final VarHandle SHORT = MethodHandles.byteArrayViewVarHandle(short[].class, ByteOrder.LITTLE_ENDIAN);

    private Chunks() {}

    static long i64(byte[] data, int at) {
        return (long) LONG.get(data, at);
    }

    static int i32(byte[] data, int at) {
        return (int) INT.get(data, at);
    }

    static short i16(byte[] data, int at) {
        return (short) SHORT.get(data, at);
    }

    static int u16(byte[] data, int at) {
        return i16(data, at) & 0xFFFF;
    }

    /** Whether the record is a whole chunk of the one known version. */
    static boolean valid(byte[] r) {
        if (r == null || r.length < HEADER || r[0] != 'S' || r[1] != 'L' || r[2] != 'R' || r[3] != 'E' || r[4] != 1
                || (r[5] & ~1) != 0) {
            return false;
        }
        long n = i32(r, 40), d = u16(r, 44), s = u16(r, 46), p = u16(r, 48), k = u16(r, 50);
        boolean int8 = r[5] == 1;
        return n >= 0 && r.length == HEADER + 12 * n + (int8 ? 4 * n + n * d : 2 * n * d) + 2 * s + 2 * p + k;
    }

    /** Adds a chunk and leaves out those that no look-up at or after its event time can see: the store's TTL. */
    static byte[] add(byte[] chunks, byte[] record, long keepMs) {
        long dead = i64(record, 16) - keepMs;
        byte[] out = new byte[chunks.length + PREFIX + record.length];
        int size = 0;
        for (int at = 0; at < chunks.length; ) {
            int length = PREFIX + i32(chunks, at);
            if (i64(chunks, at + PREFIX + 16) > dead) {
                System.arraycopy(chunks, at, out, size, length);
                size += length;
            }
            at += length;
        }
        INT.set(out, size, record.length);
        System.arraycopy(record, 0, out, size + PREFIX, record.length);
        size += PREFIX + record.length;
        return size == out.length ? out : Arrays.copyOf(out, size);
    }

    /** Offset of the first record of a value that is not empty; {@link #next} goes on from it. */
    static int first() {
        return PREFIX;
    }

    static int next(byte[] chunks, int record) {
        return record + i32(chunks, record - PREFIX) + PREFIX;
    }
}
