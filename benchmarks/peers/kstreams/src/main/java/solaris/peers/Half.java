package solaris.peers;

/** IEEE 754 half precision to float by a table of all 65,536 values (Java 17 has no conversion of its own). */
final class Half {
    private static final float[] VALUES = new float[1 << 16];

    static {
        for (int bits = 0; bits < VALUES.length; bits++) {
            int exponent = bits >> 10 & 31;
            int fraction = bits & 1023;
            double size;
            if (exponent == 0) {
                size = fraction * Math.pow(2, -24);
            } else if (exponent == 31) {
                size = fraction == 0 ? Double.POSITIVE_INFINITY : Double.NaN;
            } else {
                size = (1 + fraction / 1024.0) * Math.pow(2, exponent - 15);
            }
            VALUES[bits] = (float) ((bits & 0x8000) != 0 ? -size : size);
        }
    }

    private Half() {}

    static float of(short bits) {
        return VALUES[bits & 0xFFFF];
    }
}
