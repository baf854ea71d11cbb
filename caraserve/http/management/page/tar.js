// A tar of some files, as one Blob: the browser reads the files only when it sends them.

const BLOCK = 512, MOST_BYTES = 8 ** 11 - 1;  // of a file: the header has 11 octal digits

export function tarOf(files) {
  const parts = files.flatMap(file => [headerOf(file), file, new Uint8Array(-file.size & (BLOCK - 1))]);
  return new Blob([...parts, new Uint8Array(2 * BLOCK)], { type: "application/x-tar" });
}

// The header of a file in the format ustar.
function headerOf({ name, size, lastModified }) {
  if (size > MOST_BYTES) throw new Error(`${name} is larger than 8 GiB: send it with curl`);
  const header = new Uint8Array(BLOCK);
  const put = (at, text) => header.set(new TextEncoder().encode(text), at);
  const octal = (number, digits) => number.toString(8).padStart(digits, "0");
  put(0, name);
  put(100, "0000644\0");
  put(108, "0000000\0");
  put(116, "0000000\0");
  put(124, `${octal(size, 11)}\0`);
  put(136, `${octal(Math.floor(lastModified / 1000), 11)}\0`);
  put(148, "        ");  // the checksum is of the header with spaces in its place
  put(156, "0");
  put(257, "ustar\0" + "00");
  put(148, `${octal(header.reduce((sum, byte) => sum + byte, 0), 6)}\0 `);
  return header;
}
