"use strict";
(() => {
  const data = JSON.parse(document.getElementById("block-map-data").textContent);
  const plot = document.getElementById("block-owners");
  const states = data.states.length;
  const number = new Intl.NumberFormat("en");

  const unpack = async () => {
    const packed = Uint8Array.from(atob(data.cells), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = await new Response(stream).arrayBuffer();
    return data.width === 2 ? new Uint16Array(bytes) : new Uint32Array(bytes);
  };
  const unpacked = unpack();

  const rgb = (hue, saturation, lightness) => {
    const part = (n) => {
      const k = (n + hue / 30) % 12;
      const a = saturation * Math.min(lightness, 1 - lightness);
      return Math.round(255 * (lightness - a * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
    };
    return [part(0), part(8), part(4)];
  };

  const named = (value) => {
    const digits = value.trim().slice(1);
    return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16));
  };

  const palette = () => {
    const style = getComputedStyle(document.documentElement);
    const names = { free: "--free", cached: "--cached", shared: "--peak", kept: "--other" };
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    return [
      ...data.states.map((state) => named(style.getPropertyValue(names[state]))),
      ...data.owners.map(([, , hue, tone]) =>
        dark ? rgb(hue, 0.5, 0.42 + 0.1 * tone) : rgb(hue, 0.55, 0.38 + 0.11 * tone),
      ),
    ];
  };

  // The first row of a device is at the bottom of its picture.
  const picture = (cells, colours, { rows: [first, rows] }) => {
    const canvas = document.createElement("canvas");
    canvas.width = data.columns;
    canvas.height = rows;
    const context = canvas.getContext("2d");
    const image = context.createImageData(data.columns, rows);
    for (let row = 0; row < rows; row += 1) {
      const from = (first + row) * data.columns;
      let to = (rows - 1 - row) * data.columns * 4;
      for (let column = 0; column < data.columns; column += 1, to += 4) {
        image.data.set(colours[cells[from + column]], to);
        image.data[to + 3] = 255;
      }
    }
    context.putImageData(image, 0, 0);
    return canvas.toDataURL();
  };

  const paint = async () => {
    const cells = await unpacked;
    const colours = palette();
    const images = data.devices.map((device, i) => ({
      source: picture(cells, colours, device),
      xref: "x",
      yref: i ? "y2" : "y",
      x: 0,
      sizex: data.end,
      y: device.rows[1] * device.each,
      sizey: device.rows[1] * device.each,
      sizing: "stretch",
      layer: "below",
    }));
    await Plotly.relayout(plot, { images });
    plot.dataset.painted = String(matchMedia("(prefers-color-scheme: dark)").matches);
  };

  const told = document.createElement("div");
  told.className = "told";
  told.hidden = true;
  plot.append(told);

  const words = (cell) => {
    if (cell < states) {
      return {
        free: "free",
        cached: "cached, in no table",
        shared: "shared by several requests",
        kept: "held, but by no table",
      }[data.states[cell]];
    }
    const [id, session] = data.owners[cell - states];
    return session ? `request ${id}, session ${session}` : `request ${id}`;
  };

  const tell = async (event) => {
    const cells = await unpacked;
    const panes = [...plot.querySelectorAll(".nsewdrag")].map((pane) => pane.getBoundingClientRect());
    panes.sort((a, b) => a.top - b.top);
    const place = panes.findIndex(
      (pane) =>
        pane.left <= event.clientX && event.clientX < pane.right &&
        pane.top <= event.clientY && event.clientY < pane.bottom,
    );
    told.hidden = true;
    if (place < 0 || place >= data.devices.length) return;
    const pane = panes[place];
    const device = data.devices[place];
    const [from, to] = plot.layout.xaxis.range;
    const time = from + ((to - from) * (event.clientX - pane.left)) / pane.width;
    const block = Math.floor((device.blocks * (pane.bottom - event.clientY)) / pane.height);
    const column = Math.floor((data.columns * time) / data.end);
    if (column < 0 || column >= data.columns || block < 0 || block >= device.blocks) return;
    const row = Math.floor(block / device.each);
    const low = row * device.each;
    const high = Math.min(low + device.each, device.blocks) - 1;
    const range =
      low === high
        ? `block ${number.format(low)}`
        : `blocks ${number.format(low)}\u2013${number.format(high)}`;
    const cell = cells[(device.rows[0] + row) * data.columns + column];
    const where = `${device.name} ${range} at ${Number(time.toPrecision(6))} ${data.unit}`;
    told.replaceChildren(words(cell), document.createElement("br"), where);
    told.hidden = false;
    const whole = plot.getBoundingClientRect();
    const left = event.clientX - whole.left;
    const room = whole.width - told.offsetWidth;
    told.style.left = `${Math.max(0, Math.min(left + 14, room))}px`;
    const above = event.clientY - whole.top - told.offsetHeight - 12;
    told.style.top = `${above > 0 ? above : event.clientY - whole.top + 18}px`;
  };

  document.addEventListener("drawn", paint);
  plot.addEventListener("pointermove", tell);
  plot.addEventListener("pointerdown", tell);
  plot.addEventListener("pointerleave", () => {
    told.hidden = true;
  });
})();
