// What is embedded in the page: an overview as JSON, and packed blocks that are opened when they are needed.

const overview = JSON.parse(byId("overview").textContent);

const wholePage = new Promise((resolve) => {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", resolve, { once: true });
  else resolve();
});

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place++) bytes[place] = letters.charCodeAt(place);
  return bytes;
}

// The bytes of a block. One that the browser has not read yet is waited for.
async function unpack(id) {
  if (!byId(id)) await wholePage;
  const stream = new Blob([fromBase64(byId(id).textContent)]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

const unpackJson = async (id) => JSON.parse(new TextDecoder().decode(await unpack(id)));

// The tokens that occur. A piece is a token's text, or its bytes where they are a part of a character.
class Pieces {
  constructor({ pieces, ids, special }) {
    this.pieces = pieces;
    this.ids = ids;
    this.special = new Set(special);
  }

  // The text of each token; a character made of several tokens belongs to the last of them.
  spell(places) {
    const texts = new Array(places.length);
    let decoder = null;
    for (let at = 0; at < places.length; at++) {
      const piece = this.pieces[places[at]];
      if (typeof piece === "string") {
        if (decoder) texts[at - 1] += decoder.decode();
        decoder = null;
        texts[at] = piece;
      } else {
        decoder ??= new TextDecoder();
        texts[at] = decoder.decode(Uint8Array.from(piece), { stream: true });
      }
    }
    if (decoder) texts[places.length - 1] += decoder.decode();
    return texts;
  }
}

// All rollouts: `columns` of the list, and on demand their tokens.
class Rollouts {
  constructor(columns) {
    this.columns = columns;
    this.count = columns.id.length;
    this.chunks = overview.rollouts.chunks;
    this.rowsOf = Array.from({ length: this.chunks }, () => []);
    columns.chunk.forEach((chunk, row) => this.rowsOf[chunk].push(row));
    this.opened = new Map();
    this.texts = new Array(this.count);
    this.searchable = new Set();
  }

  static async open() {
    return new Rollouts(await unpackJson("rollouts"));
  }

  get pieces() {
    this.loading ??= unpackJson("tokens").then((tokens) => new Pieces(tokens));
    return this.loading;
  }

  async rollout(row) {
    const chunk = this.columns.chunk[row];
    if (!this.opened.has(chunk)) {
      if (this.opened.size >= 4) this.opened.delete(this.opened.keys().next().value);
      this.opened.set(chunk, unpack(`chunk-${chunk}`).then(readChunk));
    }
    return (await this.opened.get(chunk))[this.columns.place[row]];
  }

  // Put the lower-case text of a chunk's rollouts into `texts`.
  async makeSearchable(chunk) {
    if (this.searchable.has(chunk)) return;
    const [pieces, rollouts] = [await this.pieces, readChunk(await unpack(`chunk-${chunk}`))];
    for (const row of this.rowsOf[chunk]) {
      const { sequences } = rollouts[this.columns.place[row]];
      this.texts[row] = sequences.map((s) => pieces.spell(s.tokens).join("")).join("\n").toLowerCase();
    }
    this.searchable.add(chunk);
  }
}

const NONE = -32768;
const padded = (length) => length + (-length & 3);
const PLACES = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array };

// See runtime/monitor/report_rollouts.py for the layout.
function readChunk(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const sequences = header.rollouts.flatMap((rollout) => rollout.sequences);
  const tokens = sequences.reduce((sum, sequence) => sum + sequence[1], 0);
  const sampled = sequences.reduce((sum, sequence) => sum + sequence[2], 0);
  let start = 4 + padded(length);
  const next = (Kind, size) => {
    const array = new Kind(buffer, start, size);
    start += padded(size * Kind.BYTES_PER_ELEMENT);
    return array;
  };
  const all = {
    tokens: next(PLACES[header.token_bytes], tokens),
    trained: next(Uint8Array, tokens),
    engine: next(Int16Array, sampled),
    difference: next(Int16Array, sampled),
  };
  let [token, sample] = [0, 0];
  const cut = ([document, length, samples, temperature, spans]) => {
    const [toToken, toSample] = [token + length, sample + samples];
    const sequence = {
      document, temperature, spans,
      tokens: all.tokens.subarray(token, toToken),
      trained: all.trained.subarray(token, toToken),
      engine: all.engine.subarray(sample, toSample),
      difference: all.difference.subarray(sample, toSample),
    };
    [token, sample] = [toToken, toSample];
    return sequence;
  };
  return header.rollouts.map(({ metrics, sequences }) => ({ metrics, sequences: sequences.map(cut) }));
}
