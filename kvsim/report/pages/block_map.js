"use strict";
(() => {
  const data = JSON.parse(document.getElementById("block-map-data").textContent);
  const plot = document.getElementById("block-owners");
  const states = data.states.length;
  const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
  let alone = null; // The request, or session, whose blocks are shown and no others.
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
    const names = { free: "--free", cached: "--cached", shared: "--peak", kept: "--other", storing: "--swap", loading: "--waiting" };
    const others = named(style.getPropertyValue("--rule"));
    const least = dark() ? 0.38 : 0.42;
    const own = ([id, session, hue, tone]) =>
      alone === null || alone === (session || id) ? rgb(hue, 0.42, least + 0.1 * tone) : others;
    return [
      ...data.states.map((state) => named(style.getPropertyValue(names[state]))),
      ...data.owners.map(own),
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
    plot.dataset.painted = `${dark() ? "dark" : "light"} ${alone ?? ""}`.trim();
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
        kept: "held outside all block tables",
        storing: "being stored",
        loading: "being loaded",
      }[data.states[cell]];
    }
    const [id, session] = data.owners[cell - states];
    return session ? `request ${id}, session ${session}` : `request ${id}`;
  };

  // The cell at a place of the window: its number, and what it stands for.
  const find = (cells, { clientX, clientY }) => {
    const panes = [...plot.querySelectorAll(".nsewdrag")].map((pane) => pane.getBoundingClientRect());
    panes.sort((a, b) => a.top - b.top);
    const inside = ({ left, right, top, bottom }) =>
      left <= clientX && clientX < right && top <= clientY && clientY < bottom;
    const place = panes.findIndex(inside);
    if (place < 0 || place >= data.devices.length) return null;
    const pane = panes[place];
    const device = data.devices[place];
    const [from, to] = plot.layout.xaxis.range;
    const time = from + ((to - from) * (clientX - pane.left)) / pane.width;
    const block = Math.floor((device.blocks * (pane.bottom - clientY)) / pane.height);
    const column = Math.floor((data.columns * time) / data.end);
    if (column < 0 || column >= data.columns || block < 0 || block >= device.blocks) return null;
    const row = Math.floor(block / device.each);
    const low = row * device.each;
    const high = Math.min(low + device.each, device.blocks) - 1;
    const range = low === high ? "" : `\u2013${number.format(high)}`;
    const where = `${device.name} block${range && "s"} ${number.format(low)}${range}`;
    const when = `${Number(time.toPrecision(5))} ${data.unit}`;
    const cell = cells[(device.rows[0] + row) * data.columns + column];
    return { cell, place: `${where} at ${when}` };
  };

  const tell = async (event) => {
    const found = find(await unpacked, event);
    told.hidden = found === null;
    if (found === null) return;
    told.replaceChildren(words(found.cell), document.createElement("br"), found.place);
    const whole = plot.getBoundingClientRect();
    const room = whole.width - told.offsetWidth;
    told.style.left = `${Math.max(0, Math.min(event.clientX - whole.left + 14, room))}px`;
    const above = event.clientY - whole.top - told.offsetHeight - 12;
    told.style.top = `${above > 0 ? above : event.clientY - whole.top + 18}px`;
  };

  // A press that does not move; a drag is a zoom.
  let pressed = null;
  const press = (event) => {
    pressed = [event.clientX, event.clientY];
    tell(event);
  };
  const release = async (event) => {
    const [x, y] = pressed ?? [Infinity, Infinity];
    pressed = null;
    if (Math.hypot(event.clientX - x, event.clientY - y) > 3) return;
    const found = find(await unpacked, event);
    if (found === null) return;
    const [id, session] = data.owners[found.cell - states] ?? [null, null];
    const owner = session || id;
    alone = alone === owner ? null : owner;
    await paint();
  };

  document.addEventListener("drawn", paint);
  plot.addEventListener("pointermove", tell);
  plot.addEventListener("pointerdown", press, true);
  document.addEventListener("pointerup", release, true);
  plot.addEventListener("pointerleave", () => {
    told.hidden = true;
  });
})();
